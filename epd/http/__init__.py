"""HTTP/1.1 as a client speaks it: addresses, connections, heads. It knows nothing of this proxy."""
