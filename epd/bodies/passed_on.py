"""What decode answers alone: embeddings, tokens, sounds as forms.

Their media are looked at as all others are, and go on as they came, under our own keys.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from epd.bodies.cuts import NO_CUTS, Cuts, Pieces
from epd.bodies.endpoint import Endpoint
from epd.bodies.items import Body, MMItem, Path, chat_items
from epd.errors import RequestRefused

FORM = "multipart/form-data"


class PassedOn(Endpoint):
    """What decode answers without a stage before it."""

    encodes = False
    generates = False
    operation: ClassVar[str | None] = None


class Embeddings(PassedOn):
    """OpenAI's embeddings: of texts, and as vLLM has them, of conversations.

    Those are in `messages` or `input`, one or a list of them
    (`vllm/entrypoints/pooling/embed/protocol.py`).
    """

    path = "/v1/embeddings"
    operation = "embeddings"

    def items(self, body: Body) -> Iterator[MMItem]:
        """The media parts of all conversations, in order."""
        for field in ("messages", "input"):
            if isinstance(body.get(field), list):
                yield from _conversations(body[field], (field,))


class Tokenize(PassedOn):
    """vLLM's tokens of a prompt or of a conversation."""

    path = "/tokenize"
    salted = False

    def items(self, body: Body) -> Iterator[MMItem]:
        """The media parts of its conversation, in order."""
        if isinstance(body.get("messages"), list):
            yield from chat_items(body["messages"], ("messages",))


class Detokenize(PassedOn):
    """vLLM's prompt of tokens."""

    path = "/detokenize"
    salted = False


class Transcriptions(PassedOn):
    """OpenAI's transcriptions: a form with a file, which goes on byte by byte as it came."""

    path = "/v1/audio/transcriptions"
    salted = False

    def read(self, raw: bytes | bytearray, content_type: str) -> tuple[Body, Cuts]:
        """The form.

        Raises:
            RequestRefused: 415, it is none.
        """
        kind, _, parameters = content_type.partition(";")
        if kind.strip().lower() != FORM or "boundary=" not in parameters:
            raise RequestRefused(415, f"the body must be {FORM}", slug="unsupported_media_type")
        return {"form": raw, "content_type": content_type}, NO_CUTS

    def content_type(self, body: Body) -> str:
        """The form's, with its boundary."""
        return str(body["content_type"])

    def written(self, body: Body, cuts: Cuts) -> Pieces:  # noqa: ARG002
        """The form."""
        return (memoryview(body["form"]),)


class Translations(Transcriptions):
    """OpenAI's translations."""

    path = "/v1/audio/translations"


def _conversations(value: list[Any], path: Path) -> Iterator[MMItem]:
    """The media parts of a conversation, or of a list of them; texts and tokens have none."""
    if any(isinstance(one, dict) for one in value):
        yield from chat_items(value, path)
        return
    for index, one in enumerate(value):
        if isinstance(one, list):
            yield from _conversations(one, (*path, index))
