"""What instances call the models that clients ask for: names that labels may have.

A client may ask for any model; only what an instance has answered as is a name here. vLLM answers
with the served name, the first one where there are several, as the `model_name` of its own metrics
has it, and with the adapter's name for a LoRA.
"""

from typing import Any

import orjson

MAX_NAMES = 64
"""Names that are told apart; all further ones are `OTHER`."""
MAX_ASKED = 256
"""Names that clients use for them, the last ones."""
MAX_LENGTH = 256
"""Characters of a name."""
LOOKED_AT_BYTES = 256 * 1024
"""An answer of more is not read."""

OTHER = "other"

WITHIN = ("response", "message")
"""Fields of a stream's first event that have an answer's own: OpenAI's responses, Anthropic's."""


class ModelNames:
    """Learnt from answers. Belongs to one event loop."""

    def __init__(self) -> None:
        """Know none."""
        self._names: set[str] = set()
        self._asked: dict[str, str] = {}

    def of(self, asked: str | None) -> str:
        """What a model is called that a client asks for: empty where it asks for none."""
        return self._asked.get(asked, OTHER) if asked else ""

    def learn(self, asked: str | None, answer: bytes) -> None:
        """Take the word of an instance that has answered a request for this model with 2xx."""
        if not asked or asked in self._asked or len(asked) > MAX_LENGTH:
            return
        name = _named(answer)
        if name is None:
            return
        if len(self._names) < MAX_NAMES:
            self._names.add(name)
        self._asked[asked] = name if name in self._names else OTHER
        while len(self._asked) > MAX_ASKED:
            del self._asked[next(iter(self._asked))]


def _named(answer: bytes) -> str | None:
    """The model that has answered, as the answer's own field says it.

    What is deeper in it may be a client's: a response's `metadata`, what a tool is called with.
    """
    if len(answer) > LOOKED_AT_BYTES or b'"model"' not in answer:
        return None
    start = answer.find(b"{")
    end = answer.find(b"\n", start) if start else -1  # of a stream, the first event
    try:
        said: dict[str, Any] = orjson.loads(answer[start : None if end < 0 else end])
    except orjson.JSONDecodeError:
        return None
    for own in (said, *map(said.get, WITHIN)):
        match own:
            case {"model": str() as name} if name.isprintable() and 0 < len(name) <= MAX_LENGTH:
                return name
    return None
