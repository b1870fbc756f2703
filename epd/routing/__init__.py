"""The instances: their health, their load, and the choice among them. No I/O."""

from typing import Literal

BalanceName = Literal["content", "session", "round_robin", "least_load", "power_of_two"]
ItemBalanceName = Literal["affinity", "session", "round_robin", "least_load", "power_of_two"]
"""Algorithms for encode instances, where requests have item keys."""
