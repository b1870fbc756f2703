"""Facts about this machine."""

import os
import resource
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

import psutil

from epd.config import ProxyConfig
from epd.edge.access import is_loopback
from epd.edge.request_head import PER_CLIENT, RESERVED
from epd.routing.instances import Instance
from epd.tools.doctor.facts import HostFacts
from epd.tools.machine import has_accelerator

SOMAXCONN = Path("/proc/sys/net/core/somaxconn")


def read_host(config: ProxyConfig) -> HostFacts:
    """Return the facts about this machine for a proxy with this configuration."""
    folder = config.allowed_local_media_path
    return HostFacts(
        config,
        needed_descriptors=RESERVED + PER_CLIENT * -(-config.max_requests // config.workers),
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        somaxconn=_somaxconn(),
        has_forward_proxy=bool(getproxies_environment().keys() & {"http", "https"}),
        media_readable=folder is None or os.access(folder, os.R_OK | os.X_OK),
    )


def _somaxconn() -> int | None:
    try:
        return int(SOMAXCONN.read_text())
    except (OSError, ValueError):  # not Linux, or not readable in this container
        return None


def has_no_device(dev: Path, *instances: Instance) -> bool:
    """Return whether these instances run on this machine, and it has no accelerator."""
    own = {found.address for interface in psutil.net_if_addrs().values() for found in interface}
    hosts = [urlsplit(instance.url).hostname or "" for instance in instances]
    if not all(is_loopback(host) or host in own for host in hosts):
        return False
    return not has_accelerator(dev)
