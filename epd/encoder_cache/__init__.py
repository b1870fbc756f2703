"""The encoder store as seen by the proxy: keys, names, lookups, claims."""
