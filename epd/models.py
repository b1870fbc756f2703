"""What instances call the models that clients ask for: names that labels may have.

A client may ask for any model; only what an instance has answered as is a name here. vLLM answers
with the served name, the first one where there are several, as the `model_name` of its own metrics
has it, and with the adapter's name for a LoRA.
"""

import re

MAX_NAMES = 64
"""Names that are told apart; all further ones are `OTHER`."""
MAX_ASKED = 256
"""Names that clients use for them, the last ones."""
MAX_LENGTH = 256
"""Characters of a name."""
LOOKED_AT_BYTES = 4096
"""Of an answer: vLLM's begin with it, after a few short fields."""

OTHER = "other"

# A quote within a string is escaped: nothing that a model says looks like this.
NAMED = re.compile(rb'"model"\s*:\s*"([^"\\\x00-\x1f]{1,%d})"' % MAX_LENGTH)


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
        found = NAMED.search(answer, 0, LOOKED_AT_BYTES)
        if found is None:
            return
        name = found[1].decode(errors="replace")
        if len(self._names) < MAX_NAMES:
            self._names.add(name)
        self._asked[asked] = name if name in self._names else OTHER
        while len(self._asked) > MAX_ASKED:
            del self._asked[next(iter(self._asked))]
