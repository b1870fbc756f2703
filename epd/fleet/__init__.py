"""Starts vLLM instances and the proxy on one machine, and stops them again."""

from epd.fleet.engine import Engine, Topology
from epd.fleet.process import Process, ProcessDied, stop, wait_until_ready
from epd.fleet.stack import Stack, free_ports

__all__ = [
    "Engine",
    "Process",
    "ProcessDied",
    "Stack",
    "Topology",
    "free_ports",
    "stop",
    "wait_until_ready",
]
