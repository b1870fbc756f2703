"""Items of a request that need an encoder output, and the keys of these outputs. No I/O."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from epd.bodies.items import MM_KWARGS, Body, MMItem
from epd.bodies.parsing import dumped
from epd.request.context import RequestContext
from epd.routing.use import Place
from epd.transfer.encoded import Encoded

MAX_LEARNED = 65536
"""How many identifiers, and prefixes of models, are remembered that engines have made."""


class OutputKey(NamedTuple):
    """An encoder output, as far as it is known before an engine has made it.

    Attributes:
        model: the model's served name.
        uuid: the item's key.
        named: whether the item is sent under it; else engines name it by a hash of their own.
        kwargs: what else its content depends on.
    """

    model: str | None
    uuid: str
    named: bool
    kwargs: bytes

    @property
    def verbatim(self) -> bool:
        """Whether engines name it by the item's key, and what they may put before that."""
        return self.named and not self.kwargs


class EncodeJob(NamedTuple):
    """The items of one request, of which each needs an encoder output.

    Attributes:
        body: the request.
        uuids: the items and their keys; None: an engine makes the key.
        context: the request's.
        consumer: the instance that the outputs are for, with a transfer that pushes them.
        namespace: the consumer's, where it is known.
        reencode: whether what the store has is of no use, as a consumer could not load it.
        found: the items whose outputs the store has.
        answered: whether the store has said which ones it has.
    """

    body: Body
    uuids: Mapping[MMItem, str | None]
    context: RequestContext
    consumer: Place | None = None
    namespace: str | None = None
    reencode: bool = False
    found: Mapping[MMItem, Encoded] = {}
    answered: bool = False

    @property
    def skips_claims(self) -> bool:
        """Whether other proxies are not waited for: what they encode would be of no use."""
        return self.reencode or not self.answered

    @property
    def has_all_media(self) -> bool:
        """Whether the request brings the media of all its items, so that all may go on raw."""
        return all(item.has_media for item in self.uuids)

    def output(self, item: MMItem) -> OutputKey | None:
        """Return the output that an item needs; None where an engine makes the item's key."""
        uuid, body = self.uuids[item], self.body
        if uuid is None:
            return None
        kwargs = {name: body[name] for name in MM_KWARGS if body.get(name)}
        encoded = dumped(kwargs, sort_keys=True) if kwargs else b""
        model = body.get("model")
        return OutputKey(model if isinstance(model, str) else None, uuid, item.named, encoded)

    def flight(self, output: OutputKey) -> Hashable:
        """Return what requests have in common that share the encode of an output.

        Only requests with the same Authorization do: a 401 must not fail the others.
        """
        return output, self.namespace, self.context.headers.get("Authorization"), self.skips_claims


class Identifiers:
    """The keys of encoder outputs in the store, as far as they are known."""

    def __init__(self) -> None:
        self._learned: OrderedDict[OutputKey, str] = OrderedDict()
        # vLLM's, for a LoRA adapter that changes the encoder (--enable-tower-connector-lora).
        self._prefixes: OrderedDict[str | None, str] = OrderedDict()

    def of(self, output: OutputKey) -> str | None:
        """Return the key of an output in the store; None where only an engine can tell it."""
        known = self._learned.get(output)
        if known is not None:
            self._learned.move_to_end(output)
            return known
        return self._prefixes.get(output.model, "") + output.uuid if output.verbatim else None

    def learn(self, output: OutputKey, identifier: str) -> None:
        """Remember how an engine names an output."""
        if identifier == self.of(output):
            return
        if output.verbatim and identifier.endswith(output.uuid):
            self._learned.pop(output, None)
            self._prefixes[output.model] = identifier.removesuffix(output.uuid)
        else:
            self._learned[output] = identifier
        for learned in (self._learned, self._prefixes):
            while len(learned) > MAX_LEARNED:
                learned.popitem(last=False)


def item_key(item: MMItem, uuid: str | None) -> str:
    """Return what an item is known by: its key, or its URL where an engine makes the key."""
    return uuid or str(item.part.get(item.kind))


def sent_as(item: MMItem, uuid: str | None) -> str | None:
    """Return what engines are told to call an item; None: nothing."""
    return uuid if item.named else None
