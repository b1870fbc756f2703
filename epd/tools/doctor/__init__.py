"""`epd doctor`: looks at a fleet as its proxy would, and says what to change.

`facts` are what was seen, `judge` makes findings of them; `roll_call`, `instances`, `trials`,
`store` and `host` look.
"""
