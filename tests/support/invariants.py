"""Invariants that hold after every fault."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from epd.server.operator_routes import METRICS
from tests.support.fleet import Fleet, Launch, until

GRACE_S = 20.0
"""Time in seconds for resources to be released; longer than the release of a prefill at decode may
take."""

UNDER_WAY = re.compile(r"in_flight|queued|waiting|instance_requests")
"""Gauges that are 0 when the proxy is idle."""

OF_STATE = {"/health", "/ready"}
"""Routes that answer 503 with a status document instead of an error."""

PYTHONS_WORDS = re.compile(r"Traceback|Error\(|object at 0x|has no attribute|NoneType|\.py\b")


class WatchedLaunch(Launch):
    """Starts fleets, and checks that each leaves nothing behind."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._running = 0
        self._grace_s = grace_s

    @asynccontextmanager
    async def __call__(
        self, encode: int = 1, prefill: int = 0, decode: int = 1, **config: Any
    ) -> AsyncIterator[Fleet]:
        tasks, files = asyncio.all_tasks(), open_files()
        self._running += 1
        launched = super().__call__(encode, prefill, decode, **config)
        async with launched as fleet:
            fleet.http.trace_configs.append(checks_answers_of(fleet))
            yield fleet
            await becomes(lambda: under_way(fleet), {}, self._grace_s)
            await becomes(lambda: lost(fleet), 0, self._grace_s)
            errors = [event.error for event in fleet.events.requests]
            assert "internal_error" not in errors, errors
        self._running -= 1
        if self._running == 0:  # other fleets are still running, with requests of their own
            rest = {*tasks, asyncio.current_task()}
            await becomes(lambda: asyncio.all_tasks() - rest, set(), self._grace_s)
            await becomes(lambda: _opened_since(files), [], self._grace_s)


async def becomes(found: Callable[[], object], expected: object, within_s: float = GRACE_S) -> None:
    """Wait until the value is as expected; on timeout, fail with the value in the message."""
    with suppress(TimeoutError):
        await until(lambda: found() == expected, within_s)
    left = found()
    assert left == expected, left


def under_way(fleet: Fleet) -> dict[str, float]:
    """Return the work in progress at the instances, and the work that the proxy counts."""
    calls = {instance.url: float(instance.open) for instance in fleet.instances}
    page = generate_latest(fleet.runner.app[METRICS]).decode()
    gauges = {
        f"{sample.name}{sample.labels}": sample.value
        for family in text_string_to_metric_families(page)
        if family.type == "gauge" and UNDER_WAY.search(family.name)
        for sample in family.samples
    }
    return {name: value for name, value in (calls | gauges).items() if value}


def lost(fleet: Fleet) -> int:
    """Return the number of requests without exactly one outcome."""
    assert fleet.runner.server is not None
    received = fleet.runner.server.requests_count - fleet.unparsed
    return received - len(fleet.events.requests)


def open_files() -> list[Path]:
    """Return what the open descriptors point to, without those that a disk store keeps open.

    It keeps its folders, and its line of the ledger from its first write on.
    """
    others = [_target(path) for path in Path("/proc/self/fd").iterdir() if not path.is_dir()]
    return [target for target in others if target.parent.name != "usage"]


def _opened_since(before: list[Path]) -> list[Path]:
    """Return the open descriptors if they are more than before."""
    now = open_files()
    return now if len(now) > len(before) else []


def _target(path: Path) -> Path:
    try:
        return path.readlink()
    except FileNotFoundError:  # the descriptor of this listing itself
        return path


def checks_answers_of(fleet: Fleet) -> aiohttp.TraceConfig:
    """Return a trace that checks every answer of the fleet's proxy."""

    async def check(
        _: aiohttp.ClientSession, __: SimpleNamespace, end: aiohttp.TraceRequestEndParams
    ) -> None:
        ours = str(end.url).startswith(fleet.url) and end.url.path not in OF_STATE
        if ours and not end.response.ok:
            check_error(end.response, await end.response.read())

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(check)
    trace.freeze()
    return trace


def check_error(reply: aiohttp.ClientResponse, content: bytes) -> None:
    """Check the shape and the stage of an error; the proxy's own must contain no Python text."""
    said = orjson.loads(content)
    if reply.url.path.startswith("/v1/messages"):
        assert (set(said), said["type"]) == ({"type", "error"}, "error"), said
        assert set(said["error"]) == {"type", "message"}, said
    else:
        assert set(said) == {"error"}, said
        assert {"message", "type", "param", "code"} <= set(said["error"]), said
        assert said["error"]["code"] == reply.status, said
    for name in ("x-request-id", "x-epd-stage", "x-epd-error"):
        assert name in reply.headers, (name, reply.headers)
    assert reply.headers["x-epd-error"] != "internal_error", said
    if reply.headers["x-epd-stage"] == "proxy":
        # A 404 names the requested path, and so contains text from the client.
        own = said["error"]["message"].replace(f" {reply.url.raw_path}:", "")
        assert not PYTHONS_WORDS.search(own), said
