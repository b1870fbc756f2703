"""`epd up`: start of vLLM instances, an encoder store and the proxy on one machine.

`settings` reads flags and variables, `plan` derives the servers, `stack` runs them.
"""
