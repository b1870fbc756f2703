"""Starts vLLM instances and the proxy on one machine, and stops them again."""

from epd.fleet import command
from epd.fleet.engine import Engine
from epd.fleet.guarding import Guard
from epd.fleet.interrupts import held, leave_contexts_on_signals
from epd.fleet.ports import free_ports
from epd.fleet.process import Process, ProcessDied, stop, wait_until_ready
from epd.fleet.stack import Fleet, Stack
from epd.fleet.topology import Topology

__all__ = [
    "Engine",
    "Fleet",
    "Guard",
    "Process",
    "ProcessDied",
    "Stack",
    "Topology",
    "command",
    "free_ports",
    "held",
    "leave_contexts_on_signals",
    "stop",
    "wait_until_ready",
]
