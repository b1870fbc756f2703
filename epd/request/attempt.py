"""Attempt of a request: how it is sent to the instances once. Pure."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from epd.errors import Stage
from epd.policies.policy import Course
from epd.request.request import Request
from epd.routing.instances import Instance
from epd.transfer.encoded import EncodedItem

Place = tuple[str | None, str | None]
"""Where a consumer reads encoder outputs: its namespace in the store, and the address of its host's
server; None for what is unknown."""


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
        place: where the consumer reads for which they were encoded.
        worth: returns the worth of a consumer by the entries of its host; None: all have the same.
    """

    request: Request
    course: Course
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
    place: Place | None = None
    worth: Callable[[Instance], float] | None = None

    def tried_prefills(self, chosen: Instance | None) -> tuple[Instance, ...]:
        """Return the avoided prefill instances, and the one that was chosen."""
        return self.avoided_prefills if chosen is None else (*self.avoided_prefills, chosen)

    def tried_decodes(self, chosen: Instance | None) -> tuple[Instance, ...]:
        """Return the avoided decode instances, and the one that was chosen."""
        return self.avoided_decodes if chosen is None else (*self.avoided_decodes, chosen)

    @property
    def consumer_identities(self) -> Sequence[str]:
        """Identities of the items that prefill or decode encode themselves."""
        items = self.encoded_items or ()
        return [each.item.identity for each in items if each.result == "local"]
