"""Headers of vLLM's server that clients and instances exchange through the proxy. Pure.

The names are those of vLLM 0.32 (`entrypoints/generate/base/serving.py`,
`entrypoints/serve/utils/orca_metrics.py`). All other headers of clients reach no instance.
"""

import re
from collections.abc import Mapping

from multidict import CIMultiDictProxy

SESSION = "X-Session-ID"
"""Which session a request is one of. Instances are told it beside the field `session_id`."""

PRIORITY = "X-Vllm-Priority"
"""A request's place among those that wait; it goes before the field `priority`."""

LOAD_FORMAT = "endpoint-load-metrics-format"
"""How the client wants to be told the instance's load."""

LOAD = "endpoint-load-metrics"
"""The instance's load, in an answer that is not a stream (ORCA)."""

METADATA = "metadata"
"""What is where in an answer of embeddings or pooled states as bytes (`encoding_format`)."""

FORMATS = frozenset({"text", "json"})

INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
PRIORITIES = range(-(2**63), 2**63)
"""Values of the field `priority`. vLLM does not check those of the header."""

MAX_CHARACTERS = 4096
"""Length of a client's header that goes on. An instance's is bounded by its head."""


def sent_on(headers: CIMultiDictProxy[str], *, trusted: bool) -> dict[str, str]:
    """Return the headers that instances are sent of a client's.

    Args:
        headers: the client's.
        trusted: whether the client may learn an instance's load.
    """
    kept = {}
    if session := _only(headers, SESSION):
        kept[SESSION] = session
    if trusted and (said := _only(headers, LOAD_FORMAT)).lower() in FORMATS:
        kept[LOAD_FORMAT] = said
    return kept


def priority_of(headers: CIMultiDictProxy[str]) -> int | None:
    """Return the priority that the headers give a request.

    None without one, or where vLLM takes the field instead: the header is not an integer.
    """
    if PRIORITY not in headers:
        return None
    said = _only(headers, PRIORITY).strip()
    if INTEGER.fullmatch(said) is None or int(said) not in PRIORITIES:
        return None
    return int(said)


def passed_back(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that a client is sent of an instance's."""
    return {
        name: value
        for name in (LOAD, METADATA)
        if (value := headers.get(name)) and _is_plain(value)
    }


def _only(headers: CIMultiDictProxy[str], name: str) -> str:
    """The value of a header; an empty string where there is none, or several."""
    if name not in headers:
        return ""
    match headers.getall(name, ()):
        case [one] if len(one) <= MAX_CHARACTERS and _is_plain(one):
            return one
        case _:
            return ""


def _is_plain(value: str) -> bool:
    return value.isascii() and value.isprintable()
