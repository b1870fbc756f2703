"""Store in Redis, Redis Cluster, or a compatible server."""
