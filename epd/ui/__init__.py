"""Operator's page: recent events and current state of all workers, as JSON and as a web page."""
