"""What decode answers alone: embeddings, tokens, sounds as forms.

Their media are checked as those of all endpoints are, and passed on under the proxy's own keys.
"""

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from epd.bodies.cuts import NO_CUTS, Cuts, Pieces
from epd.bodies.endpoint import RESERVED, Endpoint, check_xargs, reserved
from epd.bodies.forms import FormPart, new_form, read_form
from epd.bodies.items import Body, MMItem, Path, chat_items
from epd.bodies.parsing import dumped, parse_json
from epd.errors import BadRequest

FILE = "file"
XARGS = "vllm_xargs"
SEVERAL = frozenset({"timestamp_granularities[]"})
"""Fields of a form that may come more than once."""

FIELDS = SEVERAL | {
    FILE,
    XARGS,
    "frequency_penalty",
    "hotwords",
    "include_stop_str_in_output",
    "language",
    "length_penalty",
    "max_completion_tokens",
    "min_p",
    "model",
    "n",
    "presence_penalty",
    "prompt",
    "repetition_penalty",
    "response_format",
    "seed",
    "stream",
    "stream_continuous_usage_stats",
    "stream_include_usage",
    "temperature",
    "to_language",
    "top_k",
    "top_p",
    "use_beam_search",
    "watermarking",
}
"""Fields of a form that vLLM 0.32 and 0.33 know (`vllm/entrypoints/speech_to_text`)."""

IGNORED = frozenset(
    {
        "chunking_strategy",
        "conversation_id",
        "include",
        "known_speaker_names",
        "known_speaker_references",
        "timestamp_granularities",
    }
)
"""Fields of a form that OpenAI's API or the proxy knows and vLLM ignores. They are dropped."""

MAX_FIELD_BYTES = 2**20
"""Upper bound of a field that is not a file, as of starlette, by which vLLM reads forms."""

MAX_NAME = 64
"""Characters of an unknown field's name that an error repeats."""


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
    operation: ClassVar[str | None] = "embeddings"

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
    """OpenAI's transcriptions: a form with a file, read and written anew."""

    path = "/v1/audio/transcriptions"
    salted = False

    def read(
        self,
        raw: bytes | bytearray,
        content_type: str,
        max_text_bytes: int,  # noqa: ARG002 - that of each field
    ) -> tuple[Body, Cuts]:
        """Read the form.

        Returns:
            `form`, the form to send, and `model`, where the form names one; no cuts.

        Raises:
            RequestRefused: 415, the body is not a form.
            BadRequest: the form is malformed, or has a field that no instance may get.
        """
        form = new_form(_kept(read_form(raw, content_type)))
        model = next((part.text() for part in form.parts if part.name == "model"), None)
        return {"form": form} if model is None else {"model": model, "form": form}, NO_CUTS

    def content_type(self, body: Body) -> str:
        """The form's, with its boundary."""
        return str(body["form"].content_type)

    def written(self, body: Body, cuts: Cuts) -> Pieces:  # noqa: ARG002
        """The form."""
        pieces: Pieces = body["form"].pieces()
        return pieces


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


def _kept(parts: Iterable[FormPart]) -> Iterator[FormPart]:
    """The parts of a form that an instance is sent.

    Raises:
        BadRequest: a field is reserved or unknown, comes twice, or is a file where it must not be.
    """
    seen = set[str]()
    for part in parts:
        base = part.name.partition("[")[0]
        if base in RESERVED:
            raise reserved(base)
        if base in IGNORED and part.name not in FIELDS:
            continue
        if part.name not in FIELDS:
            raise BadRequest(
                "the form has a field that this endpoint does not know",
                slug="unknown_field",
                param=part.name[:MAX_NAME],
            )
        if part.name in seen and part.name not in SEVERAL:
            raise BadRequest("the form has this field twice", slug="invalid_form", param=part.name)
        seen.add(part.name)
        yield _checked(part)


def _checked(part: FormPart) -> FormPart:
    if (part.filename is not None) != (part.name == FILE):
        raise BadRequest(
            f"the field {FILE} must be a file, and no other may be one",
            slug="invalid_form",
            param=part.name,
        )
    if part.name == FILE:
        return part
    if len(part.data) > MAX_FIELD_BYTES:
        raise BadRequest(
            f"the field is larger than {MAX_FIELD_BYTES} bytes",
            slug="invalid_form",
            param=part.name,
        )
    text = part.text()
    return _written_xargs(text) if part.name == XARGS else FormPart(part.name, text.encode())


def _written_xargs(text: str) -> FormPart:
    """The field by which a form has extra arguments, which vLLM parses as JSON."""
    try:
        xargs = parse_json(text.encode())
    except BadRequest as error:
        raise BadRequest(f"{XARGS} must be a JSON object: {error.message}", param=XARGS) from None
    check_xargs({XARGS: xargs})
    return FormPart(XARGS, dumped(xargs))
