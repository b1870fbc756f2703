"""`epd doctor`: examine a fleet as its proxy uses it, and report what to change.

`facts` has the types of facts and findings. `judge` derives findings from facts, without I/O.
`instances` queries each instance, `trials` sends requests through the stages, and `environment`
looks at this machine, the configuration and the store. `examination` runs them all.
"""
