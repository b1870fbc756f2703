"""Command `epd top`: the content of the page `/ui` in a terminal."""

from epd.top import command

__all__ = ["command"]
