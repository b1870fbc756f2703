"""Parameters of transfers between instances: a small class for each connector. Pure."""

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

Params = Mapping[str, Any]
"""Parameters (`ec_transfer_params`, `kv_transfer_params`), as instances reply them."""


def with_reachable_host(params: Params, url: str) -> Params:
    """Return an instance's parameters with a `remote_host` that other instances can reach.

    The host of the instance's URL replaces an empty host, and one that stands for every address,
    which a NIXL side channel reports if it listens at all of them.
    """
    host = params.get("remote_host")
    if not isinstance(host, str) or not _is_wildcard(host):
        return params
    return {**params, "remote_host": urlsplit(url).hostname}


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return not host


def with_params(body: Params, kv_transfer_params: Params | None) -> Params:
    """Return a request with these parameters; None leaves the request unchanged."""
    if kv_transfer_params is None:
        return body
    return {**body, "kv_transfer_params": kv_transfer_params}
