"""Endpoints that decode answers alone: embeddings, tokens, forms of audio, scores and poolings.

The wire is vLLM's (`vllm/entrypoints/pooling`, `vllm/entrypoints/speech_to_text`). Media are
checked wherever vLLM reads them, and sent unchanged, under the proxy's own keys.
"""

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from epd.api.body import NO_CUTS, Cuts, Pieces, dump_json, parse_json
from epd.api.endpoint import RESERVED, Endpoint, check_xargs, reserved_field
from epd.api.forms import FormPart, MultipartForm, read_form
from epd.api.items import (
    Body,
    Form,
    MMItem,
    Part,
    Path,
    chat_items,
    check_part,
    content_items,
    param_path,
    unknown_part,
)
from epd.errors import BadRequest

FILE = "file"
XARGS = "vllm_xargs"
SEVERAL = frozenset({"timestamp_granularities[]"})
"""Fields of a form that may come more than once."""

FIELDS = SEVERAL | {
    *(FILE, XARGS, "hotwords", "language", "model", "prompt", "response_format", "to_language"),
    # Streams.
    *("stream", "stream_continuous_usage_stats", "stream_include_usage"),
    # Sampling.
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty"),
    *("min_p", "seed", "temperature", "top_k", "top_p", "n", "use_beam_search", "watermarking"),
    *("include_stop_str_in_output", "max_completion_tokens"),
}
"""Fields of a form that vLLM 0.32 and 0.33 know (`vllm/entrypoints/speech_to_text`)."""

IGNORED = frozenset(
    {
        *("chunking_strategy", "conversation_id", "include", "timestamp_granularities"),
        *("known_speaker_names", "known_speaker_references"),
    }
)
"""Fields of a form that OpenAI's API or the proxy knows and vLLM ignores. They are dropped."""

MAX_FIELD_BYTES = 2**20
"""Upper bound of a field that is not a file: that of starlette, with which vLLM reads forms."""

MAX_NAME = 64
"""Maximum length of an unknown field's name in an error, in characters."""


SCORED = ("queries", "documents", "items", "data_1", "data_2", "text_1", "text_2", "query")
"""Fields with the compared texts and media in a request for scores or a ranking."""


class PassedOn(Endpoint):
    """Endpoint that decode answers without a stage before it."""

    encodes = False
    generates = False
    operation: ClassVar[str | None] = None

    def __init__(self, path: str) -> None:
        self.path = path


class Embeddings(PassedOn):
    """OpenAI's embeddings of texts, and vLLM's embeddings of conversations.

    A conversation, or a list of conversations, is in `messages` or `input`.
    """

    # `vllm/entrypoints/pooling/embed/protocol.py`
    operation: ClassVar[str | None] = "embeddings"

    def items(self, body: Body) -> Iterator[MMItem]:
        for field in ("messages", "input"):
            if isinstance(body.get(field), list):
                yield from _conversations(body[field], (field,))


class Tokenize(PassedOn):
    """vLLM's conversion of a prompt or a conversation to tokens."""

    salted = False

    def items(self, body: Body) -> Iterator[MMItem]:
        if isinstance(body.get("messages"), list):
            yield from chat_items(body["messages"], ("messages",))


class Detokenize(PassedOn):
    """vLLM's conversion of tokens to a prompt."""

    salted = False


class Transcriptions(PassedOn):
    """OpenAI's transcriptions and translations: a form with a file, which the proxy rewrites."""

    salted = False

    def read(
        self,
        raw: bytes | bytearray,
        content_type: str,
        max_text_bytes: int,  # noqa: ARG002 - that of each field
    ) -> tuple[Body, Cuts, int]:
        """Return the `form` to send, and its `model` if it names one; no cuts.

        Raises:
            RequestRefused: 415, the body is not a form.
            BadRequest: the form is malformed, or has a field that instances must not get.
        """
        form = MultipartForm(tuple(_known_parts(read_form(raw, content_type))))
        model = next((part.text() for part in form.parts if part.name == "model"), None)
        body = {"form": form} if model is None else {"model": model, "form": form}
        return body, NO_CUTS, len(raw)

    def content_type(self, body: Body) -> str:
        return str(body["form"].content_type)

    def encode_body(self, body: Body, cuts: Cuts) -> Pieces:  # noqa: ARG002
        pieces: Pieces = body["form"].pieces()
        return pieces


def _conversations(value: list[Any], path: Path) -> Iterator[MMItem]:
    """Yield the media parts of one or several conversations; texts and tokens have none."""
    if any(isinstance(entry, dict) for entry in value):
        yield from chat_items(value, path)
        return
    for index, conversation in enumerate(value):
        if isinstance(conversation, list):
            yield from _conversations(conversation, (*path, index))


def _known_parts(parts: Iterable[FormPart]) -> Iterator[FormPart]:
    """Yield the parts of a form that an instance gets.

    Raises:
        BadRequest: a field is reserved, unknown or repeated, or is a file and must not be one.
    """
    seen = set[str]()
    for part in parts:
        base = part.name.partition("[")[0]
        if base in RESERVED:
            raise reserved_field(base)
        if base in IGNORED and part.name not in FIELDS:
            continue
        if part.name not in FIELDS:
            raise BadRequest(
                "the form has a field that this endpoint does not know",
                slug="unknown_field",
                param=part.name[:MAX_NAME],
            )
        if part.name in seen and part.name not in SEVERAL:
            raise part.invalid("the form has this field twice")
        seen.add(part.name)
        yield _checked(part)


def _checked(part: FormPart) -> FormPart:
    if (part.filename is not None) != (part.name == FILE):
        raise part.invalid(f"the field {FILE} must be a file, and no other field may be one")
    if part.name == FILE:
        return part
    if len(part.data) > MAX_FIELD_BYTES:
        raise part.invalid(f"the field is larger than {MAX_FIELD_BYTES} bytes")
    text = part.text()
    return _written_xargs(text) if part.name == XARGS else FormPart(part.name, text.encode())


def _written_xargs(text: str) -> FormPart:
    """Return the form field with extra arguments, which vLLM parses as JSON."""
    try:
        xargs = parse_json(text.encode())
    except BadRequest as error:
        raise BadRequest(f"{XARGS} must be a JSON object: {error.message}", param=XARGS) from None
    check_xargs({XARGS: xargs})
    return FormPart(XARGS, dump_json(xargs))


class Score(PassedOn):
    """vLLM's scores of pairs, or a ranking as of Jina and Cohere: of texts or content parts."""

    def items(self, body: Body) -> Iterator[MMItem]:
        for field in SCORED:
            value = body.get(field)
            if isinstance(value, list):
                for index, entry in enumerate(value):
                    yield from _scored(entry, (field, index))
            elif value is not None:
                yield from _scored(value, (field,))


class Classify(Embeddings):
    """vLLM's classification of texts or of a conversation."""

    operation = None


class Pooling(Embeddings):
    """vLLM's pooled hidden states of texts or of a conversation."""

    operation = None

    def check(self, body: Body) -> None:
        """Reject `data`, which an I/O processor plugin of the instance would read.

        It can be any value, including a URL that the plugin fetches, and no check covers it.
        """
        if "data" in body:
            raise BadRequest(
                "data of I/O processor plugins is not accepted",
                slug="unsupported_field",
                param="data",
            )


class CohereEmbed(PassedOn):
    """Cohere's embeddings of texts, of images, or of inputs of both."""

    salted = False
    operation = "embeddings"

    def items(self, body: Body) -> Iterator[MMItem]:
        for index, image in enumerate(_list(body.get("images"), ("images",))):
            if not isinstance(image, str):
                raise BadRequest("an image must be a URL", param=f"images[{index}]")
            yield MMItem(("images", index), "image_url", _image(image), URL)
        for index, entry in enumerate(_list(body.get("inputs"), ("inputs",))):
            where: Path = ("inputs", index)
            if not isinstance(entry, dict):
                raise BadRequest("an input must be an object", param=param_path(where))
            content = _list(entry.get("content"), (*where, "content"))
            for position, part in enumerate(content):
                yield from _cohere_part(part, (*where, "content", position))


def _scored(value: Any, path: Path) -> Iterator[MMItem]:
    if isinstance(value, str):
        return
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, list):
        raise BadRequest(
            'a compared value must be a string or {"content": [content parts]}',
            param=param_path(path),
        )
    yield from content_items(content, (*path, "content"))


def _list(value: Any, path: Path) -> list[Any]:
    if not isinstance(value, list | None):
        raise BadRequest("must be a list", param=param_path(path))
    return value or []


def _cohere_part(part: Any, path: Path) -> Iterator[MMItem]:
    check_part(part, path, kinds=())
    match part:
        case {"type": "text"}:
            pass
        case {"type": "image_url", "image_url": {"url": str() as url}}:
            yield MMItem(path, "image_url", _image(url), PART)
        case {"type": "image_url"}:
            raise BadRequest('image_url must be an object with a "url"', param=param_path(path))
        case _:
            raise unknown_part(path, ("text", "image_url"))


def _image(url: str) -> Part:
    return {"type": "image_url", "image_url": {"url": url}}


URL = Form(lambda part: part["image_url"]["url"], media="", named=False)
"""Format of an image as a string. vLLM accepts no key for it."""

PART = Form(
    lambda part: {"type": "image_url", "image_url": part["image_url"]},
    media="image_url.url",
    named=False,
)
"""Format of an image in the content of an input. vLLM ignores a key there."""
