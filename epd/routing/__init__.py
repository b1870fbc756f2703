"""The instances, how each does, and which of them is next. No I/O."""
