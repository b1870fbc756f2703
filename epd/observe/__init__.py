"""Logs, metrics and traces of what the proxy does."""
