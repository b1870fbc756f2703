"""Starts vLLM instances and the proxy on one machine, and stops them again."""

from epd.fleet.engine import Engine, Topology
from epd.fleet.process import Process, ProcessDied
from epd.fleet.stack import Stack

__all__ = ["Engine", "Process", "ProcessDied", "Stack", "Topology"]
