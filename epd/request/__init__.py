"""Course of one request through its stages: encode, prefill, decode."""
