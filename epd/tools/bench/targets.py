"""Servers to measure: their URLs, models and metrics."""

import base64
import os
import re
from argparse import ArgumentTypeError
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import orjson
from prometheus_client.parser import text_string_to_metric_families

from epd.parser import admin_key

TIMEOUT_S = 30.0
FIRST_ANSWER_TIMEOUT_S = 300.0
"""Timeout of the first request, in seconds: engines compile and connect then."""
_NAMED = re.compile(r"(?:(?P<name>[\w.+-]+)=)?(?P<url>https?://.+)")


class BenchFailed(Exception):
    """Error of a benchmark without a result. The message has the reason."""


class BenchTarget(NamedTuple):
    """Server with OpenAI's API, and its name in the results."""

    name: str
    url: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `URL`, named by host and port, or `NAME=URL`; raise argparse's error otherwise."""
        match = _NAMED.fullmatch(text)
        # A password in the URL would be written to every result file.
        if match is None or not (parts := urlsplit(match["url"])).hostname or parts.username:
            raise ArgumentTypeError(f"{text!r} is not [NAME=]http://HOST:PORT")
        return cls(match["name"] or parts.netloc, match["url"].rstrip("/").removesuffix("/v1"))


class BenchModel(NamedTuple):
    """Model of a server: its name in requests, and the folder or hub name of its tokenizer."""

    id: str
    tokenizer: str


class Items(NamedTuple):
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

    @property
    def total(self) -> int:
        return self.hits + self.encoded + self.local

    def counts_since(self, before: Self) -> Self:
        return type(self)(*(now - then for now, then in zip(self, before, strict=True)))


def find_model(target: BenchTarget, name: str | None) -> BenchModel:
    """Return the model of this name or folder name; without a name, the server's only model.

    Raises:
        BenchFailed: the server has no such model, or does not answer.
    """
    body = _fetch(f"{target.url}/v1/models", _client_key())
    try:
        rows = orjson.loads(body)["data"]
        models = [BenchModel(row["id"], row.get("root") or row["id"]) for row in rows]
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise BenchFailed(f"its answer is not JSON with models: {body[:80]!r}") from error
    names = name and {name, Path(name).name}
    found = [model for model in models if names is None or model.id in names]
    if len(found) != 1:
        has = ", ".join(model.id for model in models) or "none"
        what = "no --model is given" if name is None else f"no model {name!r}"
        raise BenchFailed(f"{target.url}: {what}; its models: {has}")
    return found[0]


def warm_target(target: BenchTarget, model: BenchModel, jpeg: bytes) -> None:
    """Warm up the engines with a picture; raise `BenchFailed` if the answer is not 200."""
    url = f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"
    picture = {"type": "image_url", "image_url": {"url": url}}
    text = {"type": "text", "text": "What is in this picture?"}
    message = {"role": "user", "content": [text, picture]}
    body = orjson.dumps({"model": model.id, "messages": [message], "max_tokens": 4})
    headers = _client_key() | {"Content-Type": "application/json"}
    _fetch(f"{target.url}/v1/chat/completions", headers, body, FIRST_ANSWER_TIMEOUT_S)


def read_items(target: BenchTarget) -> Items | str:
    """Return the counts of the proxy at `target`, or the reason why they are unknown."""
    key = admin_key()
    try:
        page = _fetch(f"{target.url}/metrics", {"X-API-Key": key} if key else {})
        return parse_items(page.decode())
    except (BenchFailed, ValueError) as reason:
        return str(reason)


def parse_items(page: str) -> Items:
    """Return the counts of items on a page of `/metrics`.

    Raises:
        ValueError: the page is not that of an EPD proxy.
    """
    families = [*text_string_to_metric_families(page)]
    if not any(family.name == "epd_items" for family in families):
        raise ValueError("it is not an EPD proxy")

    def count(name: str, **labels: str) -> int:
        return sum(
            int(sample.value)
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    return Items(
        hits=count("epd_items_total", result="hit"),
        encoded=count("epd_items_total", result="encoded"),
        local=count("epd_items_total", result="local"),
        encodes=count("epd_stage_seconds_count", stage="encode", failed="false"),
    )


def _fetch(
    url: str, headers: dict[str, str], body: bytes | None = None, timeout_s: float = TIMEOUT_S
) -> bytes:
    """Return the answer to a GET, or to a POST with a body.

    Raises:
        BenchFailed: there is none, or it is an error.
    """
    try:
        with urlopen(Request(url, body, headers), timeout=timeout_s) as reply:  # noqa: S310 - http
            content: bytes = reply.read()
            return content
    except HTTPError as error:
        key = "EPD_ADMIN_API_KEY" if url.endswith("/metrics") else "OPENAI_API_KEY"
        denied = error.code in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
        advice = f" ({key} must be one of the server's)" if denied else ""
        raise BenchFailed(f"{url}: {error.code}{_message(error.read())}{advice}") from error
    except TimeoutError as error:
        raise BenchFailed(f"{url} did not answer within {timeout_s:.0f} s") from error
    except OSError as error:
        raise BenchFailed(f"{url} cannot be reached: {error}") from error


def _client_key() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _message(body: bytes) -> str:
    error: Any
    try:
        error = orjson.loads(body)["error"]
        return f": {error['message']}"
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return ""
