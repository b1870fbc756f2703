"""Store in Redis."""
