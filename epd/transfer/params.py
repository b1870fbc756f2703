"""`ec_transfer_params` and `kv_transfer_params`, as instances reply them."""

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from epd.bodies.items import Body
from epd.bodies.parsing import MAX_DEPTH, deeper, may_be_deep
from epd.errors import Stage, UpstreamFailed
from epd.json_or_none import json_or_none

Params = Mapping[str, Any]


def reply_field(reply: bytes, name: str, *, stage: Stage) -> dict[str, Any]:
    """A field of an instance's reply that is an object; empty where there is none.

    Raises:
        UpstreamFailed: the reply is no JSON, or the field is no object.
    """
    parsed = json_or_none(reply)
    value = parsed.get(name) if isinstance(parsed, dict) else ...
    if value is None:
        return {}
    if not isinstance(value, dict) or (may_be_deep(reply) and deeper(value, MAX_DEPTH)):
        raise UpstreamFailed(
            f"the {stage} instance's answer is not what vLLM sends",
            slug=f"{stage}_bad_response",
            stage=stage,
        )
    return value


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


def with_params(body: Body, kv_transfer_params: Params | None) -> Body:
    """A request with what decode has to know of prefill's blocks; None: nothing."""
    if kv_transfer_params is None:
        return body
    return {**body, "kv_transfer_params": kv_transfer_params}
