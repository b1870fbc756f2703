"""Application of the proxy, and the processes that serve it."""
