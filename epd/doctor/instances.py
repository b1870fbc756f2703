"""Looks at one instance, without sending it work."""

import asyncio
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

from epd.doctor.facts import InstanceFacts, Model
from epd.errors import ProxyError
from epd.http.connection import Broken, Unreachable
from epd.http.http1 import request_head, target_of
from epd.http.pool import Pool
from epd.json_or_none import json_or_none
from epd.routing.instances import Instance
from epd.routing.report_page import read_namespaces
from epd.upstream.client import KEEP_ALIVE_S, Upstream
from epd.upstream.reply import Answer

IDLE_S = KEEP_ALIVE_S + 0.5
"""How long an instance has to keep an idle connection: a little longer than the proxy pools one."""


class Visitor:
    """Asks instances what they say of themselves.

    Args:
        upstream: what is asked with.
        pool: connections of it that are kept for `IDLE_S` and more.
        headers: sent along, such as a key.
        timeout_s: for each answer.
    """

    def __init__(
        self, upstream: Upstream, pool: Pool, headers: Mapping[str, str], timeout_s: float
    ) -> None:
        self._upstream = upstream
        self._pool = pool
        self._headers = headers
        self._timeout_s = timeout_s

    async def look(self, instance: Instance) -> InstanceFacts:
        """What it says. Takes a little longer than `IDLE_S`."""
        try:
            health = await self._get(instance, "/health")
            if not health.ok:
                return InstanceFacts(instance, f"GET /health: {health.status}")
            version, models, metrics, keeps_alive = await asyncio.gather(
                self._get(instance, "/version"),
                self._get(instance, "/v1/models"),
                self._get(instance, "/metrics"),
                self._keeps_alive(instance),
            )
        except ProxyError as error:
            return InstanceFacts(instance, f"{error} ({_reason(error)})")
        if models.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            return InstanceFacts(instance, "it wants an API key: set OPENAI_API_KEY to it")
        return InstanceFacts(
            instance,
            version=_text(_json(version).get("version")),
            models=_models(_json(models)),
            skew_s=_skew_s(health),
            keeps_alive=keeps_alive,
            namespaces=read_namespaces(metrics.body) - {""} if metrics.ok else frozenset(),
        )

    async def _get(self, instance: Instance, path: str) -> Answer:
        return await self._upstream.fetch(
            instance.url + path, stage="proxy", headers=self._headers, timeout_s=self._timeout_s
        )

    async def _keeps_alive(self, instance: Instance) -> bool | None:
        """Whether an idle connection is still open when the proxy may yet use it."""
        target = target_of(instance.url + "/health")
        until_s = asyncio.get_running_loop().time() + self._timeout_s
        try:
            connection = await self._pool.connect(target.origin)
            try:
                await connection.ask(request_head(target, self._headers, None), (), until_s)
                while await connection.chunk(until_s):
                    pass
                await asyncio.sleep(IDLE_S)
                return connection.usable
            finally:
                connection.abort()
        except (Unreachable, Broken, TimeoutError):
            return None


def _reason(error: ProxyError) -> str:
    return str(error.__cause__ or type(error).__name__)


def _json(answer: Answer) -> Mapping[str, Any]:
    value = json_or_none(answer.body)
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _models(said: Mapping[str, Any]) -> tuple[Model, ...]:
    rows = said.get("data")
    return tuple(
        Model(row["id"], _text(row.get("root")), _length(row.get("max_model_len")))
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict) and isinstance(row.get("id"), str)
    )


def _length(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _skew_s(answer: Answer) -> float | None:
    try:
        said = parsedate_to_datetime(answer.headers.get("Date", ""))
    except ValueError:
        return None
    return said.timestamp() - time.time()
