"""Requests to instances: addresses, connections, answers."""
