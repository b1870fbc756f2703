"""Flags of vLLM's example proxy that are called something else here, or nothing.

A script written for `disagg_epd_proxy.py` runs unchanged. The help does not list them.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "--probe-interval": "probe_interval_s",
        "--probe-timeout": "health_timeout_s",
        "--fail-threshold": "eject_after",
        "--encode-policy": "encode_balance",  # its name until balance had one
    }
)
"""The settings that such flags set."""

SWITCHES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"--no-rewrite": ("decode_media", "raw"), "--log-requests": ("log_level", "debug")}
)
"""The values that such flags give to settings."""

IDLE: Mapping[str, str] = MappingProxyType(
    {
        "--decode-retries": "does nothing here: what can be tried again is, without it",
        "--evicted-ttl": "does nothing here: no registration ends by itself",
    }
)
"""Why such flags are not needed."""


class _Idle(argparse.Action):
    """Says that a flag does nothing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        del namespace, values
        sys.stderr.write(f"{parser.prog}: warning: {option_string} {self.const}\n")


def add_example_flags(parser: argparse.ArgumentParser) -> None:
    """Have a parser take them. Parsed, there are the settings that they set alone."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for flag, name in RENAMED.items():
        parser.add_argument(flag, dest=name, **hidden)
    for flag, (name, value) in SWITCHES.items():
        parser.add_argument(flag, dest=name, action="store_const", const=value, **hidden)
    for flag, why in IDLE.items():
        parser.add_argument(flag, action=_Idle, const=why, **hidden)
