"""Coordination policies: the stages of each request. Pure."""
