"""`epd doctor`: examine a fleet as its proxy uses it, and report what to change.

`examination` collects facts with `host`, `sources`, `instances`, `trials` and `store`. `checks` has
the tables of what is wrong with which facts, and what to change.
"""
