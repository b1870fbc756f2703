"""The instances' names of models, which become labels of metrics.

A client can ask for any model name. Only a name from an instance's answer becomes a label, which
bounds the number of labels. vLLM answers with the served name: the first if there are several, as
in the `model_name` label of its own metrics. For a LoRA it answers with the adapter's name.
"""

from ec_store.bounded import BoundedDict
from epd.json_or_none import json_or_none

MAX_NAMES = 64
"""Upper bound of distinct names. Further names are `OTHER`."""
MAX_REQUESTED = 256
"""Upper bound of requested names that are kept, the latest ones."""
MAX_LENGTH = 256
"""Maximum length of a name, in characters."""
LOOKED_AT_BYTES = 256 * 1024
"""Answers larger than this are not parsed."""

OTHER = "other"

NAME_WITHIN = ("response", "message")
"""Fields of a stream's first event that contain the answer object: OpenAI responses, Anthropic."""


class ModelNames:
    """Model names in answers, by the requested name. Belongs to one event loop."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._by_request: BoundedDict[str, str] = BoundedDict(MAX_REQUESTED)

    def name_of(self, requested: str | None) -> str:
        """Return the instances' name of a requested model; empty if none is requested."""
        return self._by_request.get(requested, OTHER) if requested else ""

    def learn_name(self, requested: str | None, answer: bytes) -> None:
        """Keep the model name of an instance's 2xx answer to a request for this model."""
        if not requested or requested in self._by_request or len(requested) > MAX_LENGTH:
            return
        name = _model_of(answer)
        if name is None:
            return
        if len(self._names) < MAX_NAMES:
            self._names.add(name)
        self._by_request[requested] = name if name in self._names else OTHER


def _model_of(answer: bytes) -> str | None:
    """Return the name in the answer's own `model` field.

    A client can control deeper fields: the `metadata` of a response, the arguments of a tool call.
    """
    if len(answer) > LOOKED_AT_BYTES or b'"model"' not in answer:
        return None
    start = answer.find(b"{")
    end = answer.find(b"\n", start) if start else -1  # of a stream, the first event
    event = json_or_none(answer[start : None if end < 0 else end]) or {}
    for fields in (event, *map(event.get, NAME_WITHIN)):
        match fields:
            case {"model": str() as name} if name.isprintable() and 0 < len(name) <= MAX_LENGTH:
                return name
    return None
