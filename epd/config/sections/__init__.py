"""Settings by topic: their fields, bounds and mutual exclusions."""
