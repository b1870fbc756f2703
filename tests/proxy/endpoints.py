"""Requests for the endpoints other than chat."""

import importlib
from collections.abc import Callable
from typing import Any

import openai
import pytest

from epd.api.endpoints import ENDPOINTS
from tests.requests import data_url, image
from tests.support.fake_instance import RANKINGS, SCORES
from tests.support.fleet import Fleet

URL = data_url(b"picture")
WORDS = {"type": "input_text", "text": "?"}


def picture(url: str = URL, **more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **more}


def response(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "input": [{"role": "user", "content": list(parts)}], **more}


def block() -> dict[str, Any]:
    data = URL.partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def linked(url: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "url", "url": url}}


def message(*blocks: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(blocks)}]
    return {"model": "m", "max_tokens": 5, "messages": messages, **more}


def chat(part: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": [part]}], **more}


def seen(url: str) -> dict[str, Any]:
    return {"content": [image(url)]}


def content_of(body: dict[str, Any]) -> list[Any]:
    """Return the content in which a request of `WITH_MEDIA` has its picture."""
    for field in ("messages", "input", "documents", "query", "inputs"):
        value = body.get(field)
        one = value[0] if isinstance(value, list) else value
        if isinstance(one, dict):
            content: list[Any] = one["content"]
            return content
    raise AssertionError(body)


WITH_MEDIA: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda url: chat(image(url)),
    "/v1/responses": lambda url: response(picture(url)),
    "/v1/messages": lambda url: message(linked(url)),
    "/v1/messages/count_tokens": lambda url: message(linked(url)),
    "/v1/embeddings": lambda url: chat(image(url)),
    "/tokenize": lambda url: chat(image(url)),
    **dict.fromkeys(("/pooling", "/classify"), lambda url: chat(image(url))),
    **dict.fromkeys(SCORES, lambda url: {"queries": "a", "documents": seen(url)}),
    **dict.fromkeys(RANKINGS, lambda url: {"query": seen(url), "documents": ["a"]}),
    "/v2/embed": lambda url: {"inputs": [seen(url)]},
}
"""Builder of a request with a picture, for every endpoint that accepts one."""
with_media = pytest.mark.parametrize("path", WITH_MEDIA)

PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    **{path: {"queries": "a", "documents": ["b"]} for path in SCORES},
    **{path: {"query": "a", "documents": ["b"]} for path in RANKINGS},
    "/pooling": {"input": "hi"},
    "/classify": {"input": "hi"},
    "/v2/embed": {"texts": ["hi"]},
}
SALTED = [path for path in PLAIN if ENDPOINTS[path].salted]


async def ask(
    fleet: Fleet, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    async with fleet.http.post(fleet.url + path, json=body, headers=headers) as reply:
        return reply.status, await reply.json(content_type="application/json")


def anthropic() -> Any:
    """Return Anthropic's library: 3000 modules, which each process of a run would import."""
    return importlib.import_module("anthropic")


def clients(fleet: Fleet) -> tuple[openai.AsyncOpenAI, Any]:
    """Return OpenAI's and Anthropic's client."""
    return (
        openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="k", max_retries=0),
        anthropic().AsyncAnthropic(base_url=fleet.url, api_key="k", max_retries=0),
    )


GENERATES = [path for path in PLAIN if ENDPOINTS[path].generates]
