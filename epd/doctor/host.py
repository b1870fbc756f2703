"""This machine, and what the configuration says by itself."""

import os
import resource
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

from epd.config import ProxyConfig
from epd.doctor.findings import Finding, ok, warn
from epd.edge.descriptors import PER_CLIENT, RESERVED

SOMAXCONN = Path("/proc/sys/net/core/somaxconn")
MIN_SOMAXCONN, GOOD_SOMAXCONN = 1024, 4096
"""Of `net.core.somaxconn`: below the first, a burst of clients may not fit; Linux has had the
second as its default since 5.4."""

LOAD_BALANCER_S = 60.0
"""How long common load balancers keep idle connections: who is behind one must keep them longer, or
closes a connection just as a request comes by it."""


def judge_host(config: ProxyConfig) -> Iterator[Finding]:
    """Limits, permissions and settings that need no instance to be judged."""
    yield from _judge_descriptors(config)
    yield from judge_backlog(_somaxconn())
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


def _somaxconn() -> int | None:
    try:
        return int(SOMAXCONN.read_text())
    except (OSError, ValueError):  # not Linux, or not readable in this container
        return None


def judge_backlog(somaxconn: int | None) -> Iterator[Finding]:
    """Judge how many connections the kernel holds until the proxy accepts them.

    Args:
        somaxconn: Linux's `net.core.somaxconn`; None where it is not known.
    """
    if somaxconn is None:
        return
    seen = f"the kernel holds {somaxconn} connections until the proxy accepts them"
    if somaxconn < MIN_SOMAXCONN:
        yield warn(
            "backlog",
            f"{seen}: in a burst of more, clients wait 1 s or longer to connect",
            f"sysctl -w net.core.somaxconn={GOOD_SOMAXCONN} here, and in the proxy's container or "
            "pod: it is a setting of the network namespace",
        )
    else:
        yield ok("backlog", seen)


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
    if config.admin_api_key is None and (config.uds or not _is_loopback(config.host)):
        yield warn(
            "access",
            "no admin key: /metrics and profiling answer this machine alone",
            "set EPD_ADMIN_API_KEY",
        )
    if "*" in config.allowed_origins and config.api_keys_file is None:
        yield warn(
            "access",
            "every web page that a client's browser opens can use the proxy: no keys, any origin",
            "name the pages in --allowed-origins, or set --api-keys-file",
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
