"""Attempt of a request: how it is sent to the instances once. Pure."""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from ec_store.entry import EntryInfo
from ec_store.keys import EntryKey
from epd.errors import Stage
from epd.policies.policy import Course
from epd.request.request import Request
from epd.routing.instances import CONSUMERS, Instance
from epd.routing.prefix import NO_PREFIX, Prefix
from epd.routing.reports import Host
from epd.routing.table import Reservation
from epd.transfer.encoded import EncodedItem, Prompt

if TYPE_CHECKING:
    from epd.encoder_cache.claims import Claim, Claims

NO_PROMPT = Prompt({})


class Target(NamedTuple):
    """Receiver of a request's encoder outputs, as far as it is known before the encode.

    Attributes:
        first: place at the instance that computes the prompt; None if it is chosen later.
        pushed: whether instances push outputs to the consumer, and do not store them.
        namespace: namespace in which the consumer looks up outputs; None if unknown.
        host: server of the consumer's host, if each host has a memory; None if unknown.
        fits: predicate of the instances that write where the consumer reads; None: all do.
        claims: claims in the store that the consumer reads; None without one.
        host_entries: entries that the memory of that host has; None if it was not asked.
    """

    first: Reservation | None = None
    pushed: bool = False
    namespace: str | None = None
    host: Host | None = None
    fits: Callable[[Instance], bool] | None = None
    claims: "Claims | None" = None
    host_entries: Mapping[EntryKey, EntryInfo] | None = None

    @property
    def consumer(self) -> Reservation | None:
        """The place at that instance, if it reads encoder outputs."""
        reads = self.first is not None and self.first.instance.role in CONSUMERS
        return self.first if reads else None

    @property
    def place(self) -> tuple[str | None, str | None]:
        """Where it reads outputs: its namespace, and the address of its host's server."""
        return self.namespace, None if self.host is None else self.host.address

    def with_outputs_of(self, earlier: "Target") -> "Target | None":
        """Return this target as the reader of an earlier one's outputs; None if it cannot be.

        A consumer reads them only in the same place. Without one they stay where they are. A pushed
        output is usable only once.
        """
        if self.pushed:
            return None
        if self.consumer is None:
            return self._replace(host=earlier.host) if self.namespace == earlier.namespace else None
        return self if self.place == earlier.place else None


class SendForm(IntEnum):
    """Form in which items are sent to prefill and decode. A retry may need a later one."""

    METADATA = 0
    """Placeholder metadata, if they are enough for the answer (`consumer_body`)."""
    MEDIA = 1
    """All media: an instance rejected their metadata, or entries may be lost."""
    UNNAMED = 2
    """All media without names, so that the consumer encodes them: it may have cached a name without
    its media, and lack the entry."""


class Attempt(NamedTuple):
    """How a request is sent once. `epd.request.recovery` makes the next one of a failed one.

    Attributes:
        request: the client's request, with the keys of its items.
        consumer_claims: claims of the entries that its consumer makes; one list for all attempts.
        client_decode: the decode instance that the client names; None for any.
        avoided_prefills: prefill instances to which any other is preferred: they were chosen
            before, and may be at fault.
        avoided_decodes: decode instances to which any other is preferred, for the same reason.
        failures: stages that failed before. An unreachable instance does not count.
        doubtful: an instance that may have failed because of a missing entry or block, so that an
            earlier stage may be at fault.
        resent: whether a prefill instance had the request before. The request then gets a new id,
            because connectors must not confuse the attempts.
        form: form in which items are sent.
        reencode: whether entries may be lost: items without outputs of an earlier attempt are
            encoded although they are stored.
        without_prefill: whether decode does prefill's work.
        encoded_items: an encoder output for each item, from this attempt or an earlier one; None
            before the first encode.
        target: receiver of the outputs; its place is where they are.
        prompt: what prefill and decode are sent; `NO_PROMPT` before the items are encoded.
    """

    request: Request
    course: Course
    consumer_claims: "list[Claim]"
    client_decode: Instance | None = None
    avoided_prefills: tuple[Instance, ...] = ()
    avoided_decodes: tuple[Instance, ...] = ()
    failures: tuple[Stage, ...] = ()
    doubtful: Instance | None = None
    resent: bool = False
    form: SendForm = SendForm.METADATA
    reencode: bool = False
    without_prefill: bool = False
    encoded_items: Sequence[EncodedItem] | None = None
    target: Target = Target()
    prompt: Prompt = NO_PROMPT

    @property
    def needs_prefill(self) -> bool:
        """Whether a prefill instance computes the prompt, and not decode itself."""
        return self.course.prefill and not self.without_prefill

    def prefix(self, balance: str) -> Prefix:
        """Return the content of the prompt for a choice by it; `NO_PREFIX` for other balances."""
        return self.prompt.prefix if balance == "content" else NO_PREFIX

    def tried_prefills(self, prefill: Instance | None) -> tuple[Instance, ...]:
        """Return the avoided prefill instances, and the one of this attempt."""
        return self.avoided_prefills if prefill is None else (*self.avoided_prefills, prefill)

    def tried_decodes(self, decode: Instance | None) -> tuple[Instance, ...]:
        """Return the avoided decode instances, and the one of this attempt."""
        return self.avoided_decodes if decode is None else (*self.avoided_decodes, decode)

    @property
    def consumer_identities(self) -> Sequence[str]:
        """Identities of the items that prefill or decode encode themselves."""
        if self.encoded_items is None:
            return ()
        return [each.item.identity for each in self.encoded_items if each.result == "local"]
