"""This machine, and what the configuration says by itself."""

import os
import resource
from collections.abc import Iterator
from ipaddress import ip_address

from epd.config import ProxyConfig
from epd.doctor.findings import Finding, ok, warn
from epd.edge.descriptors import PER_CLIENT, RESERVED

LOAD_BALANCER_S = 60.0
"""How long common load balancers keep idle connections: who is behind one must keep them longer, or
closes a connection just as a request comes by it."""


def judge_host(config: ProxyConfig) -> Iterator[Finding]:
    """Limits, permissions and settings that need no instance to be judged."""
    yield from _judge_descriptors(config)
    yield from _judge_umask()
    yield from _judge_media(config)
    yield from _judge_keep_alive(config)
    yield from _judge_access(config)


def _judge_descriptors(config: ProxyConfig) -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    each = -(-config.max_requests // config.workers)
    needed = RESERVED + PER_CLIENT * each
    if hard < needed:
        yield warn(
            "descriptors",
            f"a process may have {hard} open, {each} requests at once need {needed}",
            f"raise the hard limit (ulimit -Hn, LimitNOFILE=) to {needed} or more",
        )
    else:
        yield ok("descriptors", f"a process may have {hard} open")


def _judge_umask() -> Iterator[Finding]:
    mask = os.umask(0o077)
    os.umask(mask)
    if mask & 0o002:
        yield ok("umask", f"{mask:04o}")
    else:
        yield warn("umask", f"{mask:04o}: everybody may write what is created", "umask 027")


def _judge_media(config: ProxyConfig) -> Iterator[Finding]:
    folder = config.allowed_local_media_path
    if folder is not None and not os.access(folder, os.R_OK | os.X_OK):
        yield warn("media", f"{folder} cannot be read here", "mount it here as on the instances")
    if config.media_fetch == "proxy" and not config.allowed_media_domains:
        yield warn(
            "media",
            "the proxy fetches from any host with a public address",
            "name the hosts: --allowed-media-domains",
        )
    elif config.media_fetch == "engine":
        yield warn(
            "media",
            "engines fetch http(s) media themselves, from whatever they can reach",
            "give the engines --allowed-media-domains, or the proxy --media-fetch proxy",
        )


def _judge_keep_alive(config: ProxyConfig) -> Iterator[Finding]:
    if config.keep_alive_s <= LOAD_BALANCER_S:
        yield warn(
            "keep-alive",
            f"idle clients' connections are closed after {config.keep_alive_s:g} s",
            f"--keep-alive-s above that of the load balancer, often {LOAD_BALANCER_S:g} s",
        )
    else:
        yield ok("keep-alive", f"idle clients' connections are kept for {config.keep_alive_s:g} s")


def _judge_access(config: ProxyConfig) -> Iterator[Finding]:
    if config.admin_api_key is None and not _is_loopback(config.host):
        yield warn(
            "access",
            "no admin key: /metrics and profiling answer this machine alone",
            "set EPD_ADMIN_API_KEY",
        )
    if config.api_keys_file is not None and config.key_secret is None:
        yield warn(
            "access",
            "tenants' keys can be guessed at by who can list the store",
            "set EPD_KEY_SECRET, the same for every replica",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
