"""Flags of vLLM's example proxies that have another name here, or no effect.

A script written for `disagg_epd_proxy.py` or `disagg_proxy_multiturn.py` runs unchanged. The help
does not list these flags.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from epd.routing.urls import is_address

HOST = re.compile(r"[A-Za-z0-9._-]+")
"""Name of a host, or an IPv4 address."""

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "--probe-interval": "probe_interval_s",
        "--probe-timeout": "health_timeout_s",
        "--fail-threshold": "eject_after",
        "--encode-policy": "encode_balance",  # the former name of the setting
    }
)
"""Settings that these flags set."""

SWITCHES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"--no-rewrite": ("decode_media", "raw"), "--log-requests": ("log_level", "debug")}
)
"""Settings and values that these flags stand for."""

IDLE: Mapping[str, str] = MappingProxyType(
    {
        "--decode-retries": "does nothing here: the proxy retries without it",
        "--evicted-ttl": "does nothing here: registrations do not expire",
    }
)
"""Reasons why these flags have no effect."""

SERVERS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"prefill_servers_urls": ("prefiller", 8100), "decode_servers_urls": ("decoder", 8200)}
)
"""Settings that flags with hosts and ports set: the server's name in these flags, and its default
port."""


class Listed(NamedTuple):
    """Values of a flag that takes several, with the flag as it was written."""

    flag: str
    values: Sequence[Any]


class _Named(argparse.Action):
    """Action that stores the name under which a flag was given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        del parser
        setattr(namespace, self.dest, Listed(option_string or "", values or ()))


class _Idle(argparse.Action):
    """Action that warns that a flag has no effect."""

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
    """Add the flags to a parser. The parsed namespace has only the settings of given flags."""
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
        several: dict[str, Any] = {"action": _Named, "nargs": "+", **hidden}
        parser.add_argument(*hosts, dest=f"{server}_hosts", **several)
        parser.add_argument(*ports, dest=f"{server}_ports", type=int, **several)


def with_urls(flags: Mapping[str, Any], reasons: list[str]) -> Mapping[str, Any]:
    """Return the flags with hosts and ports replaced by URLs, and without encode instances.

    If only hosts or only ports are given, the others have their default, as in vLLM's proxy.

    Args:
        flags: parsed flags.
        reasons: list to which an error message is added for each invalid flag. Invalid hosts and
            ports become no URLs.
    """
    named = {f"{server}_{what}" for server, _ in SERVERS.values() for what in ("hosts", "ports")}
    if named.isdisjoint(flags):
        return flags
    kept = {name: value for name, value in flags.items() if name not in named}
    urls = {}
    for setting, (server, port) in SERVERS.items():
        hosts, ports = (flags.get(f"{server}_{what}") for what in ("hosts", "ports"))
        if setting in kept:
            if one := hosts or ports:
                flag = "--" + setting.replace("_", "-")
                reasons.append(f"{flag} and {one.flag} exclude each other: keep one")
            continue
        hosts = hosts or Listed(f"--{server}-hosts", ["localhost"])
        ports = ports or Listed(f"--{server}-ports", [port])
        if wrong := list(_wrong(hosts, ports)):
            reasons += wrong
        else:
            urls[setting] = tuple(map(_url, hosts.values, ports.values))
    return {"encode_servers_urls": (), **urls, **kept}


def _wrong(hosts: Listed, ports: Listed) -> Iterator[str]:
    for host in hosts.values:
        if "/" in host:
            yield f"{hosts.flag} {host!r} is a URL: name a host"
        elif not (HOST.fullmatch(host) or is_address(host.strip("[]"))):
            yield f"{hosts.flag} {host!r} is not a host: separate hosts by spaces, without ports"
    for port in ports.values:
        if not 0 < port < 2**16:
            yield f"{ports.flag} {port} is not a port: use a number from 1 to 65535"
    found, wanted = len(ports.values), len(hosts.values)
    if found != wanted:
        yield f"{hosts.flag} names {wanted}, {ports.flag} {found}: name one port per host"


def _url(host: str, port: int) -> str:
    host = host.strip("[]")
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
