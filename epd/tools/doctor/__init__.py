"""`epd doctor`: examine a fleet as its proxy uses it, and report what to change.

`instances`, `trials` and `environment` collect facts, from which `judge` derives findings without
I/O. `examination` runs them all.
"""
