"""Items of a request that need an encoder output, and the keys of these outputs. No I/O."""

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from ec_store.bounded import BoundedDict
from epd.bodies.items import MM_KWARGS, Body, MMItem
from epd.bodies.parsing import dumped
from epd.request.context import RequestContext
from epd.routing.use import Place
from epd.transfer.encoded import Encoded

MAX_LEARNED = 65536
"""Upper bound of the engine-made identifiers that are kept, and of the prefixes of models."""


class OutputKey(NamedTuple):
    """Identity of an encoder output before an engine has made it.

    Attributes:
        model: served name of the model.
        uuid: key of the item.
        named: whether engines receive the key as the item's name; else they name it by a hash.
        kwargs: processor arguments that the content depends on, as JSON.
    """

    model: str | None
    uuid: str
    named: bool
    kwargs: bytes

    @property
    def verbatim(self) -> bool:
        """Whether engines name the output by the item's key, possibly with a prefix."""
        return self.named and not self.kwargs


class EncodeJob(NamedTuple):
    """The items of one request, each of which needs an encoder output.

    Attributes:
        body: the request.
        uuids: keys of the items; None for a key that an engine makes.
        context: context of the request.
        consumer: the instance that receives the outputs, with a transfer that pushes them.
        namespace: namespace of the consumer, if known.
        reencode: whether to ignore stored outputs, because a consumer could not load them.
        found: stored outputs, by item.
        answered: whether the store answered the lookup.
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
        """Whether to ignore other proxies' claims, because their outputs would be unusable."""
        return self.reencode or not self.answered

    @property
    def has_all_media(self) -> bool:
        """Whether the request contains the media of all its items, so that all can be sent raw."""
        return all(item.has_media for item in self.uuids)

    def output(self, item: MMItem) -> OutputKey | None:
        """Return the output that an item needs; None if an engine makes the item's key."""
        uuid, body = self.uuids[item], self.body
        if uuid is None:
            return None
        kwargs = {name: body[name] for name in MM_KWARGS if body.get(name)}
        encoded = dumped(kwargs, sort_keys=True) if kwargs else b""
        model = body.get("model")
        return OutputKey(model if isinstance(model, str) else None, uuid, item.named, encoded)

    def flight(self, output: OutputKey) -> Hashable:
        """Return the key under which requests share the encode of an output.

        Only requests with the same Authorization share it: a 401 must not fail the others.
        """
        return output, self.namespace, self.context.headers.get("Authorization"), self.skips_claims


class Identifiers:
    """The store keys of encoder outputs, as far as known."""

    def __init__(self) -> None:
        self._learned: BoundedDict[OutputKey, str] = BoundedDict(MAX_LEARNED)
        # The prefix that vLLM adds for a LoRA of the encoder (--enable-tower-connector-lora).
        self._prefixes: BoundedDict[str | None, str] = BoundedDict(MAX_LEARNED)

    def of(self, output: OutputKey) -> str | None:
        """Return the store key of an output; None if only an engine can compute it."""
        known = self._learned.get(output)
        if known is not None:
            self._learned.move_to_end(output)
            return known
        return self._prefixes.get(output.model, "") + output.uuid if output.verbatim else None

    def learn(self, output: OutputKey, identifier: str) -> None:
        """Remember the engine's name of an output."""
        if identifier == self.of(output):
            return
        if output.verbatim and identifier.endswith(output.uuid):
            self._learned.pop(output, None)
            self._prefixes[output.model] = identifier.removesuffix(output.uuid)
        else:
            self._learned[output] = identifier


def item_key(item: MMItem, uuid: str | None) -> str:
    """Return the identity of an item: its key, or its URL if an engine makes the key."""
    return uuid or str(item.part.get(item.kind))


def sent_as(item: MMItem, uuid: str | None) -> str | None:
    """Return the name of an item in requests to engines; None to leave it unnamed."""
    return uuid if item.named else None
