"""The encoder cache as seen by the proxy: keys, names, lookups, claims."""
