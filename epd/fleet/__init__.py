"""Starts vLLM instances and the proxy on one machine, and stops them again."""

from epd.fleet import command
from epd.fleet.engine import Engine
from epd.fleet.process import Process, ProcessDied
from epd.fleet.stack import Fleet, Stack
from epd.fleet.topology import Topology

__all__ = ["Engine", "Fleet", "Process", "ProcessDied", "Stack", "Topology", "command"]
