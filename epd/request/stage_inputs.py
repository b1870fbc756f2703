"""Attempts of a request: the items to encode with their keys, the plan, and the results. No I/O."""

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, Self

from ec_store.bounded import BoundedDict
from epd.api.body import dump_json
from epd.api.items import MM_KWARGS, Body, MMItem
from epd.errors import ProxyError, Stage
from epd.policies.plan import Course, Facts, ItemPlace, ItemRule
from epd.request.context import RequestContext
from epd.routing.instances import Instance
from epd.routing.prefix import NO_PREFIX, Prefix
from epd.routing.table import NO_WORK, Reservation, Work
from epd.transfer.encoded import Consumed, Encoded, EncodedItem


class Encodings(NamedTuple):
    """Encoder outputs of a request's items.

    Attributes:
        items: one output for each item.
        namespace: namespace of the consuming instance, if known.
        local_keys: keys of the items that prefill or decode encode themselves.
    """

    items: tuple[EncodedItem, ...] = ()
    namespace: str | None = None
    local_keys: tuple[str, ...] = ()

    @classmethod
    def of_items(
        cls,
        items: Sequence[EncodedItem],
        namespace: str | None,
        uuids: Mapping[MMItem, str | None],
    ) -> Self:
        """Return the outputs of items with these keys."""
        local = [encoded_item.item for encoded_item in items if encoded_item.result == "local"]
        return cls(tuple(items), namespace, tuple([item_key(item, uuids[item]) for item in local]))


class Targets(NamedTuple):
    """Instances chosen before the items are encoded.

    Attributes:
        consumer: the instance that consumes the outputs, if they are pushed or consumers have
            different namespaces.
        decode: the decode instance, if it was chosen early and consumes no outputs.
    """

    consumer: Reservation | None = None
    decode: Instance | None = None

    @property
    def instance(self) -> Instance | None:
        """The instance that answers the request unless another one prefills it, if chosen."""
        return self.decode if self.consumer is None else self.consumer.instance


NO_ENCODINGS, NO_TARGETS = Encodings(), Targets()


class Attempt(NamedTuple):
    """Plan of one sending. `epd.request.recovery` derives the next one.

    Attributes:
        course: stages of the request.
        facts: facts by which the policies decided the course.
        avoided_prefills: prefill instances to which any other is preferred: they have had the
            request, and may be at fault.
        avoided_decodes: decode instances to which any other is preferred, for the same reason.
        failures: stages that failed before. An unreachable instance does not count.
        doubtful: an instance that may have failed because of a missing entry or block, so that an
            earlier stage may be at fault.
        encodings: encoder outputs of an earlier attempt.
        resent: whether a prefill instance had the request before. The request then gets a new id,
            because connectors must not confuse the attempts.
        reencode: whether entries may be lost: all items are encoded again, and the media are sent
            too.
        raw: whether all media are sent, because an instance rejected the metadata in their place.
        without_prefill: whether decode does prefill's work.
    """

    course: Course
    facts: Facts
    avoided_prefills: tuple[Instance, ...] = ()
    avoided_decodes: tuple[Instance, ...] = ()
    failures: tuple[Stage, ...] = ()
    doubtful: Instance | None = None
    encodings: Encodings | None = None
    resent: bool = False
    reencode: bool = False
    raw: bool = False
    without_prefill: bool = False


class KeyedRequest(NamedTuple):
    """Request, and the keys of its media items.

    Attributes:
        body: the client's request, with the media that the proxy fetched.
        uuids: keys of the items; None for a key that an engine makes.
        pixels: number of pixels of each picture in the request; 0 for an unknown format.
    """

    body: Body
    uuids: Mapping[MMItem, str | None] = {}
    pixels: Mapping[MMItem, int] = {}


class Sending(NamedTuple):
    """Input of the stages: a request, the plan of one attempt, and the context."""

    request: KeyedRequest
    attempt: Attempt
    context: RequestContext


class PreparedRequest(NamedTuple):
    """Request as prefill and decode get it, after its items are encoded.

    Attributes:
        sending: the attempt.
        encodings: encoder outputs of the items.
        consumed: body for prefill and decode.
        prefix: content of the prompt, if instances are chosen by it.
        work: predicted work of the instance that prefills.
    """

    sending: Sending
    encodings: Encodings
    consumed: Consumed
    prefix: Prefix = NO_PREFIX
    work: Work = NO_WORK

    @property
    def prefill_prefix(self) -> Prefix:
        """Content of the prompt, if the prefill instance is chosen by it."""
        chosen = self.sending.context.config.prefill_balance == "content"
        return self.prefix if chosen else NO_PREFIX

    @property
    def decode_prefix(self) -> Prefix:
        """Content of the prompt, if the decode instance is chosen by it."""
        chosen = self.sending.context.config.decode_balance == "content"
        return self.prefix if chosen else NO_PREFIX

    def blames_instance(self, stage: Stage, *, loads_blocks: bool) -> bool:
        """Return whether a 500 of this stage is the instance's own fault.

        The first 500 of a stage that loads entries or blocks may mean that they are missing.
        """
        loads = self.consumed.depends or loads_blocks
        return not loads or stage in self.sending.attempt.failures


class FailedAttempt(NamedTuple):
    """Failure of an attempt, with the results of the steps before.

    Attributes:
        attempt: the plan.
        error: error of the step that failed.
        encodings: encoder outputs of the items; None if a step up to the encode failed.
        depends: whether the request fails if an encoder output is missing (`Consumed.depends`).
        prefill: the prefill instance that was chosen; None if none was.
        reads_back: whether it was asked to read decode's blocks of the previous turn.
        prefilled: whether a prefill instance provides KV blocks for decode.
        decode: the decode instance that was chosen; None if none was.
    """

    attempt: Attempt
    error: ProxyError
    encodings: Encodings | None = None
    depends: bool = False
    prefill: Instance | None = None
    reads_back: bool = False
    prefilled: bool = False
    decode: Instance | None = None

    @property
    def failed_decodes(self) -> tuple[Instance, ...]:
        """The decode instances that this attempt avoids, and the one that failed in it."""
        avoided, decode = self.attempt.avoided_decodes, self.decode
        return avoided if decode is None or self.error.stage != "decode" else (*avoided, decode)


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
    def is_verbatim(self) -> bool:
        """Whether engines name the output by the item's key, possibly with a prefix."""
        return self.named and not self.kwargs


Outputs = Mapping[MMItem, OutputKey | None]
"""The output that each item needs; None if an engine makes the item's key."""


class ItemPlan(NamedTuple):
    """Plan for one item that is not in the store.

    Attributes:
        pixels: number of a picture's pixels; 0 if unknown.
        tokens: predicted number of its encoder tokens.
        place: where it is encoded; None without a policy that decides.
        instance: URL of the encode instance that is expected to encode it first; None if unknown.
    """

    pixels: int
    tokens: int
    place: ItemPlace | None = None
    instance: str | None = None

    @property
    def local(self) -> bool:
        """Whether prefill or decode encodes it."""
        return self.place is not None and self.place.local


UNPLANNED = ItemPlan(0, 0)
"""Value of an item that is in the store."""

FirstTry = Callable[[MMItem, list[Instance]], Awaitable[Encoded | None]]
"""First try of an item, possibly in one request with others: see `FirstTries.encode_item`."""


class EncodeJob(NamedTuple):
    """Items of one request, each of which needs an encoder output.

    Attributes:
        body: the request.
        uuids: keys of the items; None for a key that an engine makes.
        pixels: number of pixels of each picture in the request; 0 for an unknown format.
        context: context of the request.
        consumer: the instance that receives the outputs, with a transfer that pushes them.
        namespace: namespace of the consumer, if known.
        reencode: whether to ignore stored outputs, because a consumer could not load them.
        rule: the policy's rule for items that are not in the store; None: all are encoded.
    """

    body: Body
    uuids: Mapping[MMItem, str | None]
    pixels: Mapping[MMItem, int]
    context: RequestContext
    consumer: Reservation | None = None
    namespace: str | None = None
    reencode: bool = False
    rule: ItemRule | None = None

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
        encoded = dump_json(kwargs, sort_keys=True) if kwargs else b""
        model = body.get("model")
        return OutputKey(model if isinstance(model, str) else None, uuid, item.is_named, encoded)


class StoreLookup(NamedTuple):
    """Result of the lookup of a request's items.

    Attributes:
        answered: whether the store answered.
        found: stored outputs, by item.
    """

    answered: bool = False
    found: Mapping[MMItem, Encoded] = {}


class PlannedJob(NamedTuple):
    """Items of one request after their lookup in the store.

    Attributes:
        job: the items.
        outputs: output that each item needs; None if an engine makes the item's key.
        lookup: result of the lookup.
        plans: plans for the items that are not in the store.
    """

    job: EncodeJob
    outputs: Outputs
    lookup: StoreLookup
    plans: Mapping[MMItem, ItemPlan]

    @property
    def skips_claims(self) -> bool:
        """Whether to ignore other proxies' claims, because their outputs would be unusable."""
        return self.job.reencode or not self.lookup.answered

    def plan_of(self, item: MMItem) -> ItemPlan:
        """Return the plan of an item."""
        return self.plans.get(item, UNPLANNED)

    def flight_key(self, output: OutputKey) -> Hashable:
        """Return the key under which requests share the encode of an output.

        Only requests with the same Authorization share it: a 401 must not fail the others.
        """
        job = self.job
        return output, job.namespace, job.context.headers.get("Authorization"), self.skips_claims


class Identifiers:
    """Store keys of encoder outputs, as far as known."""

    def __init__(self) -> None:
        self._learned: BoundedDict[OutputKey, str] = BoundedDict(MAX_LEARNED)
        # The prefix that vLLM adds for a LoRA of the encoder (--enable-tower-connector-lora).
        self._prefixes: BoundedDict[str | None, str] = BoundedDict(MAX_LEARNED)

    def identifier_of(self, output: OutputKey) -> str | None:
        """Return the store key of an output; None if only an engine can compute it."""
        known = self._learned.get(output)
        if known is not None:
            self._learned.move_to_end(output)
            return known
        return self._prefixes.get(output.model, "") + output.uuid if output.is_verbatim else None

    def learn_identifier(self, output: OutputKey, identifier: str) -> None:
        """Remember the engine's name of an output."""
        if identifier == self.identifier_of(output):
            return
        if output.is_verbatim and identifier.endswith(output.uuid):
            self._learned.pop(output, None)
            self._prefixes[output.model] = identifier.removesuffix(output.uuid)
        else:
            self._learned[output] = identifier


def item_key(item: MMItem, uuid: str | None) -> str:
    """Return the identity of an item: its key, or its URL if an engine makes the key."""
    return uuid or str(item.part.get(item.kind))


def sent_as(item: MMItem, uuid: str | None) -> str | None:
    """Return the name of an item in requests to engines; None to leave it unnamed."""
    return uuid if item.is_named else None
