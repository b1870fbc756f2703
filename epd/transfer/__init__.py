"""What instances tell each other through the proxy: a small class for each connector. Pure."""
