"""Scores, rankings, classes and poolings, which decode answers alone.

The wire is vLLM's (`vllm/entrypoints/pooling`). Media are checked wherever vLLM reads them, and
sent as they came under the proxy's own keys.
"""

from collections.abc import Iterator
from typing import Any

from epd.bodies.items import (
    Body,
    Form,
    MMItem,
    Part,
    Path,
    check_part,
    content_items,
    param,
    unknown_part,
)
from epd.bodies.passed_on import Embeddings, PassedOn
from epd.errors import BadRequest

SCORED = ("queries", "documents", "items", "data_1", "data_2", "text_1", "text_2", "query")
"""Fields of a request for scores or a ranking that hold what is compared."""


class Score(PassedOn):
    """vLLM's scores of pairs, each side a text or content parts."""

    path = "/score"

    def items(self, body: Body) -> Iterator[MMItem]:
        """The media parts of both sides, in the order of `SCORED`."""
        for field in SCORED:
            value = body.get(field)
            if isinstance(value, list):
                for index, one in enumerate(value):
                    yield from _scored(one, (field, index))
            elif value is not None:
                yield from _scored(value, (field,))


class ScoreV1(Score):
    """The same scores by vLLM's older path."""

    path = "/v1/score"


class Rerank(Score):
    """Jina's and Cohere's ranking of documents, with vLLM's content parts."""

    path = "/rerank"


class RerankV1(Rerank):
    """Jina's path."""

    path = "/v1/rerank"


class RerankV2(Rerank):
    """Cohere's path."""

    path = "/v2/rerank"


class Classify(Embeddings):
    """vLLM's classes of texts or of a conversation."""

    path = "/classify"
    operation = None


class Pooling(Embeddings):
    """vLLM's pooled hidden states of texts or of a conversation."""

    path = "/pooling"
    operation = None

    def check(self, body: Body) -> None:
        """Refuse `data`, which an I/O processor plugin of the instance would read.

        It can be anything, a URL that the plugin fetches among it, and no check covers it.
        """
        if "data" in body:
            raise BadRequest(
                "data of I/O processor plugins is not accepted",
                slug="unsupported_field",
                param="data",
            )


class CohereEmbed(PassedOn):
    """Cohere's embeddings of texts, of images, or of inputs of both."""

    path = "/v2/embed"
    salted = False
    operation = "embeddings"

    def items(self, body: Body) -> Iterator[MMItem]:
        """The images, and those among the content of inputs."""
        for index, image in enumerate(_list(body.get("images"), ("images",))):
            if not isinstance(image, str):
                raise BadRequest("an image must be a URL", param=f"images[{index}]")
            yield MMItem(("images", index), "image_url", _image(image), URL)
        for index, one in enumerate(_list(body.get("inputs"), ("inputs",))):
            where: Path = ("inputs", index)
            if not isinstance(one, dict):
                raise BadRequest("an input must be an object", param=param(where))
            content = _list(one.get("content"), (*where, "content"))
            for position, part in enumerate(content):
                yield from _cohere_part(part, (*where, "content", position))


def _scored(value: Any, path: Path) -> Iterator[MMItem]:
    """The media parts of one side of a pair."""
    if isinstance(value, str):
        return
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, list):
        raise BadRequest(
            'what is compared must be a string or {"content": [content parts]}', param=param(path)
        )
    yield from content_items(content, (*path, "content"))


def _list(value: Any, path: Path) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest("must be a list", param=param(path))
    return value


def _cohere_part(part: Any, path: Path) -> Iterator[MMItem]:
    """The item that a part of an input is; none for text."""
    check_part(part, path, kinds=())
    if part["type"] == "text":
        return
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else None
    if part["type"] != "image_url":
        raise unknown_part(path, ("text", "image_url"))
    if not isinstance(url, str):
        raise BadRequest('image_url must be an object with a "url"', param=param(path))
    yield MMItem(path, "image_url", _image(url), PART)


def _image(url: str) -> Part:
    return {"type": "image_url", "image_url": {"url": url}}


URL = Form(lambda part: part["image_url"]["url"], media="", named=False)
"""An image as a string. vLLM takes no key for it."""

PART = Form(
    lambda part: {"type": "image_url", "image_url": part["image_url"]},
    media="image_url.url",
    named=False,
)
"""An image among the content of an input. vLLM ignores a key there."""
