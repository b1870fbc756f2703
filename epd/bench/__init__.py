"""Benchmarks of the proxy's own cost and of a fleet behind it."""

from epd.bench import command

__all__ = ["command"]
