"""`epd top`: what the page `/ui` shows, in a terminal."""

from epd.top import command

__all__ = ["command"]
