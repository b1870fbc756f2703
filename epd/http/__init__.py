"""HTTP/1.1 client: addresses, connections, heads. Independent of the rest of the proxy."""
