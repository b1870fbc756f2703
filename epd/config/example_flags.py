"""Flags of vLLM's example proxies that are called something else here, or nothing.

A script written for `disagg_epd_proxy.py` or `disagg_proxy_multiturn.py` runs unchanged. The help
does not list them.
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

SERVERS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"prefill_servers_urls": ("prefiller", 8100), "decode_servers_urls": ("decoder", 8200)}
)
"""The settings that hosts and ports set: what such flags call the servers, and the default port."""


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
    for server, _ in SERVERS.values():
        hosts, ports = (
            [f"--{server}-{plural}", f"--{server}-{plural[:-1]}"] for plural in ("hosts", "ports")
        )
        parser.add_argument(*hosts, dest=f"{server}_hosts", nargs="+", **hidden)
        parser.add_argument(*ports, dest=f"{server}_ports", nargs="+", type=int, **hidden)


def with_urls(flags: Mapping[str, Any], reasons: list[str]) -> Mapping[str, Any]:
    """The flags, with URLs in the place of hosts and ports; there are no encode instances then.

    What only one of the two servers is named by has the other at its default, as in vLLM's proxy.

    Args:
        flags: as they were parsed.
        reasons: what is wrong with them is added here.
    """
    named = {f"{server}_{what}" for server, _ in SERVERS.values() for what in ("hosts", "ports")}
    if named.isdisjoint(flags):
        return flags
    kept = {name: value for name, value in flags.items() if name not in named}
    urls = {}
    for setting, (server, port) in SERVERS.items():
        hosts, ports = (flags.get(f"{server}_{what}") for what in ("hosts", "ports"))
        if setting in kept:
            if hosts or ports:
                flag = "--" + setting.replace("_", "-")
                reasons.append(f"{flag} and --{server}-hosts are one too many: keep either")
            continue
        hosts, ports = hosts or ["localhost"], ports or [port]
        if len(hosts) != len(ports):
            reasons.append(
                f"--{server}-hosts are {len(hosts)}, --{server}-ports {len(ports)}: name a port "
                "for each host"
            )
        reasons += [
            f"--{server}-hosts {host!r} is a URL: name a host" for host in hosts if "/" in host
        ]
        reasons += [
            f"--{server}-hosts {host!r} is no host: name each by itself"
            for host in hosts
            if "," in host
        ]
        urls[setting] = tuple(map(_url, hosts, ports))
    return {"encode_servers_urls": (), **urls, **kept}


def _url(host: str, port: int) -> str:
    host = host.strip("[]")
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
