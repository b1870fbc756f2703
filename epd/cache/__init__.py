"""The encoder cache as the proxy asks it: keys, names, look-ups, claims."""
