"""Scheduler's side of a consumer. It accesses neither disk nor network."""

import enum
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

from ec_store.counts import Counts
from ec_store.engine.accept import Acceptance, ItemTarget
from ec_store.engine.fetch_queue import Want
from ec_store.engine.fetcher import Fetcher, FetchState
from ec_store.engine.tensors import DTYPES
from ec_store.entry import ITEM_BYTES, HeldEntry
from ec_store.vllm_connector.media_cache import has_media
from ec_store.vllm_connector.widths import MODALITIES, Widths


class How(enum.Enum):
    """State of an item of a request."""

    OPEN = enum.auto()
    WAITING = enum.auto()
    """State while the entry is being fetched."""
    PINNED = enum.auto()
    """State while the entry is pinned in memory for this item."""
    LOCAL = enum.auto()
    """This engine encodes the item, unless another request has its entry by then."""
    COMPUTED = enum.auto()
    """State after the tokens of the item are computed."""


@dataclass(slots=True, eq=False)
class Part:
    """Media item of one request.

    A client may give two images one name: items of one identifier may differ in their tokens.

    Attributes:
        end: number of computed tokens of the request from which the item is no longer needed.
        holds_pin: whether the item pins its entry, or the one that is being fetched.
    """

    feature: Any
    identifier: str
    tokens: int
    end: int
    how: How = How.OPEN
    holds_pin: bool = False

    @classmethod
    def from_feature(cls, feature: Any) -> Self:
        where = feature.mm_position
        end = where.offset + where.length
        return cls(feature, feature.identifier, where.get_num_embeds(), end)


@dataclass(slots=True, eq=False)
class Needs:
    """Items of a request, and how far they are.

    Attributes:
        parts: items, in the order in which their tokens are computed.
        asked_s: time of the first call for this request, monotonic.
        preemptions: number of its preemptions at that time.
        passed: number of leading items with computed tokens.
        computed: end of the last of these items. With fewer computed tokens, some were lost.
        admitted: whether there was room for all of its entries.
        waiting: number of its entries that are being fetched.
        arrived: items with a result of their fetch since the last call for this request.
    """

    parts: list[Part]
    asked_s: float
    preemptions: int
    passed: int = 0
    computed: int = 0
    admitted: bool = False
    failed: bool = False
    waiting: int = 0
    arrived: list[tuple[Part, FetchState]] = field(default_factory=list)

    def has_changed(self, request: Any, computed: int) -> bool:
        """Return whether a request has lost computed tokens, or its session has more items."""
        return (
            computed < self.computed
            or request.num_preemptions != self.preemptions
            or len(request.mm_features) != len(self.parts)
        )


class Consumer:
    """Manager of a consumer's entries: each is in memory before the step that needs it.

    Requests are admitted to the memory budget one by one, in the order in which the scheduler asks
    about them within a step. Each is admitted with all of its items: two requests that had half of
    theirs would wait for each other. While one request waits for room, all later ones wait too, so
    that none overtakes it indefinitely. An item is held until its tokens are computed.

    vLLM identifies an item by its identifier alone, and an entry that does not fit ends the engine
    (`ec_store.engine.accept`). So while an entry is pinned, no other request may use its
    identifier with another number of tokens. The later request fails, or encodes its item and pins
    nothing. vLLM's own encoder cache, which has the same keys, fails such a request too.

    The cost of a call depends on the changes since the last one: an item that is being fetched,
    encoded here, pinned, or computed is not checked again.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        model_config: Any,
        resolver: PlaceholderMetadataResolver,
        widths: Widths,
        counts: Counts,
    ) -> None:
        """Create the consumer; `counts` gets failed requests and rejected entries."""
        self._fetcher = fetcher
        self._wait_left_s = fetcher.wait_s
        self._dtype = DTYPES[model_config.dtype]
        # Building a processor is slow: it is done here and not in a step.
        self._fields = {modality: resolver.fields_for(modality) for modality in MODALITIES}
        self._widths = widths
        self._counts = counts
        self._accept = Acceptance(counts)
        self._learn: dict[str, str] = {}
        self._requests: dict[str, Needs] = {}
        self._blocking: Needs | None = None
        self._waiters: defaultdict[str, dict[Part, Needs]] = defaultdict(dict)
        self._pinned: Counter[str] = Counter()
        self._local: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._unavailable: set[str] = set()
        self._loads: dict[str, HeldEntry] = {}

    @property
    def placeholder_fields(self) -> frozenset[str]:
        """Fields of items that come as metadata, of all modalities."""
        return frozenset[str]().union(*self._fields.values())

    def ensure_items(self, request: Any, computed: int) -> bool:
        """Return whether each item that a request needs is here or will be encoded here."""
        needs = self._requests.get(request.request_id)
        if needs is None:
            needs = self._new(request, computed)
        elif needs.has_changed(request, computed):
            needs = self._reset_request(request, computed)
        elif computed > needs.computed:
            self._release_computed(needs, computed)
        if needs.passed == len(needs.parts):
            return True
        self._record_results()
        if not needs.admitted and (self._blocking is None or self._blocking is needs):
            self._admit(request, needs)
            self._wait_for_fetches(needs)
        while needs.arrived and not needs.failed:
            self._settle_part(request, needs, *needs.arrived.pop())
        return needs.admitted and not needs.waiting and not needs.failed

    def encode_here(self, request: Any, computed: int) -> bool:
        """Encode the items that a request does not hold, after `ensure_items` has raised.

        Return whether all of them can be encoded here; if not, the request fails.
        """
        needs = self._requests.get(request.request_id) or self._new(request, computed)
        needs.admitted = True
        needs.arrived.clear()
        for part in needs.parts:
            if part.end > computed and part.how not in {How.PINNED, How.LOCAL}:
                self._release_part(needs, part)
                self._encode(request, needs, part)
        return not needs.failed

    def fail(self, request: Any) -> None:
        """Have vLLM fail this one request."""
        if request.request_id not in self._unavailable:
            self._counts.add(failed_requests=1)
            self._unavailable.add(request.request_id)

    def take_unavailable(self) -> set[str]:
        """Return requests with an item that can be neither loaded nor encoded, and clear them."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def has(self, identifier: str) -> bool:
        return identifier in self._pinned

    def load(self, identifier: str) -> None:
        """Add an entry to the next step's loads, if it is held for a request."""
        entry = self._fetcher.entry(identifier)
        if entry is not None and self.has(identifier):
            self._loads[identifier] = entry

    def take_learn(self) -> dict[str, str]:
        """Return modalities by identifier of items that are encoded here, to report their width."""
        taken, self._learn = self._learn, {}
        return taken

    def handle_message(self, message: dict[str, Any]) -> None:
        """Process a worker's message: columns of the items it has encoded, by modality."""
        for modality, columns in message.get("widths", {}).items():
            self._widths.learn_columns(modality, columns)

    def end_step(self) -> dict[str, HeldEntry]:
        """Return the step's loads. The scheduler starts with its first request again after it."""
        self._blocking = None
        self._wait_left_s = self._fetcher.wait_s
        taken, self._loads = self._loads, {}
        return taken

    def release(self, request_id: str) -> None:
        """Release the entries of a request, held or being fetched."""
        needs = self._requests.pop(request_id, None)
        if needs is None:
            return
        if self._blocking is needs:
            self._blocking = None
        for part in needs.parts:
            self._release_part(needs, part)

    def close(self) -> None:
        """Stop fetching; running fetches end by themselves."""
        self._fetcher.close()

    def _new(self, request: Any, computed: int) -> Needs:
        parts = sorted(map(Part.from_feature, request.mm_features), key=lambda part: part.end)
        needs = Needs(parts, time.monotonic(), request.num_preemptions)
        self._requests[request.request_id] = needs
        self._release_computed(needs, computed)
        return needs

    def _reset_request(self, request: Any, computed: int) -> Needs:
        """Reset a request that has lost tokens. Its entries stay in memory while there is room.

        It is admitted again, and at once if it has computed tokens: those occupy blocks of the KV
        cache, for which admitted requests may wait.
        """
        self.release(request.request_id)
        needs = self._new(request, computed)
        if request.num_computed_tokens > 0:
            self._start(needs, self._requested_parts(request, needs))
        return needs

    def _release_computed(self, needs: Needs, computed: int) -> None:
        while needs.passed < len(needs.parts) and needs.parts[needs.passed].end <= computed:
            part = needs.parts[needs.passed]
            self._release_part(needs, part)
            part.how = How.COMPUTED
            needs.passed += 1
            needs.computed = part.end

    def _admit(self, request: Any, needs: Needs) -> None:
        wants = self._requested_parts(request, needs)
        if self._fetcher.has_room({part.identifier: want for part, want in wants.items()}):
            self._blocking = None
            self._start(needs, wants)
        else:
            self._blocking = needs

    def _start(self, needs: Needs, wants: Mapping[Part, Want]) -> None:
        """Pin all entries, held ones first: fetching the others may drop unpinned entries."""
        needs.admitted = True
        for part in sorted(wants, key=lambda want: self._fetcher.entry(want.identifier) is None):
            state = self._fetcher.acquire(part.identifier, wants[part])
            part.holds_pin = state is not FetchState.MISSING
            if state is FetchState.PENDING:
                part.how = How.WAITING
                needs.waiting += 1
                self._waiters[part.identifier][part] = needs
            else:
                needs.arrived.append((part, state))

    def _requested_parts(self, request: Any, needs: Needs) -> dict[Part, Want]:
        # Any JSON value: a client sets it if no proxy removes it.
        params = request.ec_transfer_params
        promised = params if isinstance(params, dict) else {}
        unsettled = [part for part in needs.parts[needs.passed :] if part.how is How.OPEN]
        wants = {}
        for part in unsettled:
            target = self._target(part)
            wants[part] = Want(
                size_bytes=target.rows * (target.columns or 0) * ITEM_BYTES[self._dtype],
                accept=partial(self._accept, target),
                asked_s=needs.asked_s,
                rank=request.priority,
                promised=part.identifier in promised,
            )
        return wants

    def _target(self, part: Part) -> ItemTarget:
        modality = part.feature.modality
        columns = self._widths.known_columns(modality)
        return ItemTarget(part.identifier, modality, self._dtype, part.tokens, columns)

    def _wait_for_fetches(self, needs: Needs) -> None:
        """Wait for the lookups of a request that was just admitted, within the step's time.

        A promised entry that is not stored yet is looked up again later: no step waits for that.
        """
        is_first = self._fetcher.is_first_lookup
        while self._wait_left_s > 0 and any(
            part.how is How.WAITING and is_first(part.identifier) for part in needs.parts
        ):
            began_s = time.monotonic()
            self._fetcher.wait_for_result(self._wait_left_s)
            self._wait_left_s -= time.monotonic() - began_s
            self._record_results()

    def _record_results(self) -> None:
        """Pass results of fetches to the waiting requests; their next call settles the items."""
        for identifier, state in self._fetcher.process_results():
            for part, needs in self._waiters.pop(identifier, {}).items():
                part.how = How.OPEN
                part.holds_pin = state is FetchState.READY
                needs.waiting -= 1
                needs.arrived.append((part, state))

    def _settle_part(self, request: Any, needs: Needs, part: Part, state: FetchState) -> None:
        if part.how is not How.OPEN:  # the item was computed meanwhile
            return
        if state is FetchState.READY and self._fits(part):
            part.how = How.PINNED
            self._pinned[part.identifier] += 1
            return
        self._release_part(needs, part)
        if state is FetchState.READY and not self.has(part.identifier):
            # Dropped, so that the next request reads the store, where it may be replaced by then.
            self._fetcher.discard(part.identifier)
        self._encode(request, needs, part)

    def _fits(self, part: Part) -> bool:
        """Return whether an entry fits this item and all items that vLLM may use it for."""
        entry = self._fetcher.entry(part.identifier)
        if entry is None or not self._accept.accepts_entry(self._target(part), entry):
            return False
        fits = all(tokens == part.tokens for tokens in self._local.get(part.identifier, ()))
        if not fits:
            self._counts.add(misfits=1)
        return fits

    def _encode(self, request: Any, needs: Needs, part: Part) -> None:
        """Mark an item for encoding here, or fail a request that cannot encode it.

        A request cannot encode an item without media, or while another request has pinned an entry
        of the same identifier.
        """
        if self.has(part.identifier) or not self._has_media(part.feature):
            needs.failed = True
            self.fail(request)
            return
        part.how = How.LOCAL
        self._local[part.identifier][part.tokens] += 1
        if self._widths.is_derived(part.feature.modality):
            self._learn[part.identifier] = part.feature.modality

    def _release_part(self, needs: Needs, part: Part) -> None:
        name = part.identifier
        if part.how is How.WAITING:
            needs.waiting -= 1
            del self._waiters[name][part]
            _drop_empty(self._waiters, name)
        elif part.how is How.PINNED:
            self._pinned[name] -= 1
            _drop_empty(self._pinned, name)
        elif part.how is How.LOCAL:
            self._local[name][part.tokens] -= 1
            _drop_empty(self._local[name], part.tokens)
            _drop_empty(self._local, name)
        part.how = How.OPEN
        if part.holds_pin:
            part.holds_pin = False
            self._fetcher.release(name)

    def _has_media(self, feature: Any) -> bool:
        """Return whether this engine could encode the item itself."""
        if feature.data is None:
            return False
        return has_media(feature.data, self._fields.get(feature.modality, set()))


def _drop_empty(values: MutableMapping[Any, Any], key: Any) -> None:
    if not values[key]:
        del values[key]
