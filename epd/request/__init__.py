"""One request through its stages: encode, prefill, decode."""
