"""Starts vLLM instances and the proxy on one machine, and stops them again."""
