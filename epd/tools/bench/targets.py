"""Servers to measure: their URLs, models and metrics."""

import asyncio
import base64
import os
import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import orjson
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 30.0
FIRST_ANSWER_TIMEOUT_S = 300.0
"""Timeout of the first request, in seconds: engines compile and connect then."""

_NAMED = re.compile(r"(?:(?P<name>[\w.+-]+)=)?(?P<url>https?://.+)")


class TargetFailed(Exception):
    """Error of a server that cannot be measured. The message has the reason."""


class NoFigures(Exception):
    """Error of a server without metrics of items. The message has the reason."""


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """Server with OpenAI's API, and its name in the results."""

    name: str
    url: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `URL`, named by host and port, or `NAME=URL`; raise `ValueError` otherwise."""
        match = _NAMED.fullmatch(text)
        # A password in the URL would be written to every result file.
        if match is None or not (parts := urlsplit(match["url"])).hostname or parts.username:
            raise ValueError(f"{text!r} is not [NAME=]http://HOST:PORT")
        return cls(match["name"] or parts.netloc, match["url"].rstrip("/").removesuffix("/v1"))


@dataclass(frozen=True, slots=True)
class BenchModel:
    """Model of a server, by its name in requests.

    The tokenizer is a folder or hub name; by default the model's source that the server reports.
    """

    id: str
    tokenizer: str


@dataclass(frozen=True, slots=True)
class Items:
    """Counts of a proxy for the media items of requests.

    Attributes:
        hits: items with encoder outputs that were stored or being encoded.
        encoded: items that encode instances encoded.
        local: items that prefill or decode encoded.
        encodes: successful requests to encode instances.
    """

    hits: int
    encoded: int
    local: int
    encodes: int

    def counts_since(self, before: Self) -> "Items":
        counts = zip(astuple(self), astuple(before), strict=True)
        return Items(*(now - then for now, then in counts))

    @property
    def total(self) -> int:
        return self.hits + self.encoded + self.local


def find_model(target: BenchTarget, wanted: str | None) -> BenchModel:
    """Return the model of this name or folder name; without a name, the server's only model.

    Raises:
        TargetFailed: the server has no such model, or does not answer.
    """
    status, body = asyncio.run(_request("GET", f"{target.url}/v1/models", _client_key()))
    if status != HTTPStatus.OK:
        raise TargetFailed(f"{target.url}/v1/models: {_error(status, body)}")
    rows = _json(body).get("data", [])
    models = [BenchModel(row["id"], row.get("root") or row["id"]) for row in rows]
    names = wanted and {wanted, Path(wanted).name}
    found = [model for model in models if names is None or model.id in names]
    if len(found) != 1:
        has = ", ".join(model.id for model in models) or "none"
        what = "no --model is given" if wanted is None else f"no model {wanted!r}"
        raise TargetFailed(f"{target.url}: {what}; its models: {has}")
    return found[0]


def warm_target(target: BenchTarget, model: BenchModel, jpeg: bytes) -> None:
    """Warm up the engines with a picture; raise `TargetFailed` if the answer is not 200."""
    url = f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"
    picture = {"type": "image_url", "image_url": {"url": url}}
    text = {"type": "text", "text": "What is in this picture?"}
    message = {"role": "user", "content": [text, picture]}
    body = orjson.dumps({"model": model.id, "messages": [message], "max_tokens": 4})
    status, answer = asyncio.run(
        _request(
            "POST",
            f"{target.url}/v1/chat/completions",
            _client_key() | {"Content-Type": "application/json"},
            body,
            FIRST_ANSWER_TIMEOUT_S,
        )
    )
    if status != HTTPStatus.OK:
        reason = _error(status, answer)
        raise TargetFailed(f"{target.url} failed a request with a picture: {reason}")


def read_items(target: BenchTarget) -> Items:
    """Return the counts of the proxy at `target`.

    Raises:
        NoFigures: the target is not an EPD proxy, or rejects the request.
        TargetFailed: the target cannot be reached.
    """
    key = os.environ.get("EPD_ADMIN_API_KEY") or os.environ.get("ADMIN_API_KEY")
    headers = {"X-API-Key": key} if key else {}
    status, body = asyncio.run(_request("GET", f"{target.url}/metrics", headers))
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        raise NoFigures(f"its /metrics answered {status}: EPD_ADMIN_API_KEY must be the proxy's")
    if status != HTTPStatus.OK:
        raise NoFigures(f"its /metrics answered {status}")
    try:
        return parse_items(body.decode())
    except ValueError as error:
        raise NoFigures("its /metrics are not in Prometheus' format") from error


def parse_items(page: str) -> Items:
    """Return the counts of items on a page of `/metrics`.

    Raises:
        NoFigures: the page is not that of an EPD proxy.
        ValueError: the page is not in Prometheus' format.
    """
    families = {family.name: family for family in text_string_to_metric_families(page)}
    if "epd_items" not in families:
        raise NoFigures("it is not an EPD proxy")

    def count(result: str) -> int:
        return _sum([families["epd_items"]], "epd_items_total", result=result)

    return Items(
        hits=count("hit"),
        encoded=count("encoded"),
        local=count("local"),
        encodes=_sum(families.values(), "epd_stage_seconds_count", stage="encode", failed="false"),
    )


def _sum(families: Iterable[Metric], name: str, **labels: str) -> int:
    samples = (sample for family in families for sample in family.samples)
    return sum(
        int(sample.value)
        for sample in samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def _request(
    method: str,
    url: str,
    headers: dict[str, str],
    body: bytes | None = None,
    timeout_s: float = TIMEOUT_S,
) -> tuple[int, bytes]:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as http,
            http.request(method, url, data=body) as reply,
        ):
            return reply.status, await reply.read()
    except TimeoutError as error:
        raise TargetFailed(f"{url} did not answer within {timeout_s:.0f} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise TargetFailed(f"{url} cannot be reached: {error}") from error


def _client_key() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _json(body: bytes) -> dict[str, Any]:
    try:
        loaded = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise TargetFailed(f"its answer is not JSON: {body[:80]!r}") from error
    return loaded if isinstance(loaded, dict) else {}


def _error(status: int, body: bytes) -> str:
    try:
        error = orjson.loads(body)["error"]
        return f"{status}, {error['message']}"
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return str(status)
