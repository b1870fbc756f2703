"""Measures: what the proxy costs, and what a fleet behind it does."""

from epd.bench import command

__all__ = ["command"]
