"""Coordination policies: what runs where for one request. Pure."""
