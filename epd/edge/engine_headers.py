"""Headers of vLLM's server that clients and instances exchange through the proxy. Pure.

The names are those of vLLM 0.32 (`entrypoints/generate/base/serving.py`,
`entrypoints/serve/utils/orca_metrics.py`). No other header of a client is forwarded from here.
"""

import re
from collections.abc import Mapping

from multidict import CIMultiDictProxy

from epd.edge.access import single_value

SESSION = "X-Session-ID"
"""Header with the session of a request. It is forwarded in addition to the field `session_id`."""

PRIORITY = "X-Vllm-Priority"
"""Header with a request's priority in the engine's queue. It overrides the field `priority`."""

LOAD_FORMAT = "endpoint-load-metrics-format"
"""Request header with the format in which the client wants the instance's load."""

LOAD = "endpoint-load-metrics"
"""Response header with the instance's load, for responses that are not streams (ORCA)."""

METADATA = "metadata"
"""Response header that describes the layout of embeddings or pooled states sent as bytes
(`encoding_format`)."""

FORMATS = frozenset({"text", "json"})

INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
PRIORITIES = range(-(2**63), 2**63)
"""Valid values of the field `priority`. vLLM does not check the range of the header."""

MAX_CHARACTERS = 4096
"""Upper bound of the length of a forwarded header."""


def sent_on(headers: CIMultiDictProxy[str], *, trusted: bool) -> dict[str, str]:
    """Return the client's headers that go to instances; a trusted client may see their load."""
    forwarded = {}
    if session := _single_header(headers, SESSION):
        forwarded[SESSION] = session
    if trusted and (load_format := _single_header(headers, LOAD_FORMAT)).lower() in FORMATS:
        forwarded[LOAD_FORMAT] = load_format
    return forwarded


def priority_of(headers: CIMultiDictProxy[str]) -> int | None:
    """Return the priority in the headers of a request.

    None if there is no header or it is not an integer: vLLM then uses the field `priority`.
    """
    if PRIORITY not in headers:
        return None
    priority = _single_header(headers, PRIORITY).strip()
    if INTEGER.fullmatch(priority) is None or int(priority) not in PRIORITIES:
        return None
    return int(priority)


def passed_back(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the instance's headers that are passed to the client."""
    return {
        name: value
        for name in (LOAD, METADATA)
        if (value := headers.get(name)) and _is_plain(value)
    }


def _single_header(headers: CIMultiDictProxy[str], name: str) -> str:
    """Return the value of a header; an empty string if it is missing, repeated or invalid."""
    value = single_value(headers, name)
    return value if len(value) <= MAX_CHARACTERS and _is_plain(value) else ""


def _is_plain(value: str) -> bool:
    return value.isascii() and value.isprintable()
