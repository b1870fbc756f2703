"""`ec_transfer_params` and `kv_transfer_params`, as instances reply them."""

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

Params = Mapping[str, Any]


def reachable(params: Params, url: str) -> Params:
    """Params whose `remote_host` is one that others can reach.

    Args:
        params: an instance's.
        url: its URL, whose host they get where they say none, or every address, as a NIXL side
            channel that listens at all of them does.
    """
    host = params.get("remote_host")
    if not isinstance(host, str) or not _everywhere(host):
        return params
    return {**params, "remote_host": urlsplit(url).hostname}


def _everywhere(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return not host


def with_params(body: Params, kv_transfer_params: Params | None) -> Params:
    """A request with what decode has to know of prefill's blocks; None: nothing."""
    if kv_transfer_params is None:
        return body
    return {**body, "kv_transfer_params": kv_transfer_params}
