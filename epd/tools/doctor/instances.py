"""Facts about instances without a request to the model."""

import asyncio
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

from epd.config import ProxyConfig
from epd.errors import ProxyError
from epd.json_or_none import json_or_none
from epd.kv_events.addresses import event_endpoints
from epd.routing.instances import Instance
from epd.routing.reports import read_namespaces
from epd.tools.doctor.facts import InstanceFacts, ModelFacts, Preparation, Trial
from epd.upstream import Upstream, WholeReply, underlying_error

_PREPARATION = re.compile(rb"(?m)^vllm:ec_store_preparation_info\{([^}\n]{,1024})\} 1(?:\.0)?$")
_LABEL = re.compile(r'(\w+)="([^"\\]*)"')


async def read_instance(
    instance: Instance, upstream: Upstream, config: ProxyConfig
) -> InstanceFacts:
    """Return the facts about an instance, read over the proxy's connections."""
    headers, timeout_s = headers_of(config), config.health_timeout_s

    async def get(path: str) -> WholeReply:
        return await upstream.fetch(
            instance.url + path, stage="proxy", headers=headers, timeout_s=timeout_s
        )

    try:
        health = await get("/health")
        if not health.ok:
            seen = f"GET /health: {health.status}"
            return InstanceFacts(instance, seen, status=health.status)
        version, models, metrics = await asyncio.gather(
            get("/version"), get("/v1/models"), get("/metrics")
        )
    except ProxyError as error:
        refuses = isinstance(underlying_error(error), ConnectionRefusedError)
        seen = f"{error} ({error.__cause__ or type(error).__name__})"
        return InstanceFacts(instance, seen, refuses=refuses)
    if models.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return InstanceFacts(instance, "requires an API key: set OPENAI_API_KEY")
    if not models.ok and not version.ok:
        seen = f"GET /version: {version.status}, GET /v1/models: {models.status}"
        return InstanceFacts(instance, seen, status=models.status)
    return InstanceFacts(
        instance,
        version=_text(_json(version).get("version")),
        models=_models(_json(models)),
        skew_s=_skew_s(health),
        namespaces=read_namespaces(metrics.body) - {""} if metrics.ok else frozenset(),
        preparation=read_preparation(metrics.body) if metrics.ok else None,
    )


def headers_of(config: ProxyConfig) -> dict[str, str]:
    """Return the headers that the proxy sends to instances for a client without a key."""
    key = config.openai_api_key
    return {} if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}


def _json(answer: WholeReply) -> Mapping[str, Any]:
    value = json_or_none(answer.body)
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _models(answer: Mapping[str, Any]) -> tuple[ModelFacts, ...]:
    rows = answer.get("data")
    return tuple(
        ModelFacts(row["id"], _length(row.get("max_model_len")), _text(row.get("parent")))
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict) and isinstance(row.get("id"), str)
    )


def _length(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _skew_s(answer: WholeReply) -> float | None:
    try:
        date = parsedate_to_datetime(answer.headers.get("Date", ""))
    except ValueError:
        return None
    return date.timestamp() - time.time()


def read_preparation(page: bytes) -> Preparation | None:
    """Return how an instance prepares media; None: its page does not say."""
    sample = _PREPARATION.search(page)
    labels = {} if sample is None else dict(_LABEL.findall(sample[1].decode(errors="replace")))
    api_servers = labels.get("api_servers", "")
    if not api_servers.isdecimal():
        return None
    media_io = tuple(filter(None, labels.get("media_io", "").split(",")))
    return Preparation(
        int(api_servers), labels.get("processor", "cpu"), labels.get("device", "cpu"), media_io
    )


async def try_subscription(instance: Instance, addresses: Sequence[str], timeout_s: float) -> Trial:
    """Return whether each engine of an instance accepts a subscriber to its KV events."""
    return await asyncio.to_thread(_subscribe, event_endpoints(instance, addresses), timeout_s)


def _subscribe(endpoints: Iterable[str], timeout_s: float) -> Trial:
    import zmq  # noqa: PLC0415 - of the extra `kv-events`

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for endpoint in endpoints:
            socket = context.socket(zmq.SUB)
            socket.set(zmq.IPV6, 1)
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            socket.connect(endpoint)
            if not monitor.poll(int(1000 * timeout_s)):
                return Trial(f"{endpoint} accepts no subscriber")
    finally:
        context.destroy(0)
    return Trial()
