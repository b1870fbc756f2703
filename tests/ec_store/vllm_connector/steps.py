"""Steps of an engine, as the connector sees them."""

from collections.abc import Callable
from typing import Any

from ec_store import Entry, EntryKey, open_store
from tests.ec_store.waiting import until


def put(connector: Any, url: str, identifier: str, entry: Entry) -> None:
    with open_store(url) as store:
        assert store.put(EntryKey(connector.namespace, identifier), entry)


def settle(connector: Any, request: Any) -> set[str]:
    """Ask until the request may be scheduled or must fail; return the requests that must fail."""
    failed: set[str] = set()

    def settled() -> bool:
        failed.update(connector.take_unavailable_requests())
        return bool(failed) or connector.ensure_cache_available(request, 0)

    until(settled)
    return failed


def ask(connector: Any, vllm: Any, name: str, *features: Any) -> tuple[Any, set[str]]:
    """Settle a request of this name; return it and the requests that must fail for it."""
    request = vllm.request(*features)
    request.request_id = name
    return request, settle(connector, request)


def counted(connector: Any) -> dict[str, float]:
    """Return the counters since the last call, without gauges and observations."""
    from ec_store.vllm_connector.metrics import COUNTERS  # noqa: PLC0415 - imports vLLM

    stats = connector.get_ec_connector_stats()
    return {name: value for name, value in stats.data.items() if name in COUNTERS} if stats else {}


class Step:
    """Part of vLLM's scheduler output for a step that the connector reads."""

    def __init__(self, *requests: Any) -> None:
        self.scheduled_new_reqs = requests


Connect = Callable[..., Any]
