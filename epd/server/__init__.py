"""Application of the proxy: its routes, their handlers, and `epd serve`."""
