"""One sending of a request: how it goes out, and what has come of it. No I/O."""

from dataclasses import dataclass
from typing import NamedTuple

from epd.errors import Stage
from epd.policies.course import Course, Facts
from epd.request.context import RequestContext
from epd.routing.instances import Instance
from epd.routing.use import Place
from epd.transfer.encoded import Consumed, EncodedItem


class Encodings(NamedTuple):
    """The encoder outputs of a request's items.

    Attributes:
        items: one for each item.
        namespace: of the instance that they are for, where it is known.
        local_keys: keys of the items that prefill or decode encode themselves.
    """

    items: tuple[EncodedItem, ...] = ()
    namespace: str | None = None
    local_keys: tuple[str, ...] = ()


NOT_ENCODED = Encodings()
"""Those of an attempt that has not come as far as its encode."""


class Targets(NamedTuple):
    """Instances that are chosen before the items are encoded.

    Attributes:
        consumer: the instance that the outputs are for, where they are pushed to it, or where
            consumers have different namespaces.
        decode: the decode instance, where it was chosen then and takes no outputs.
    """

    consumer: Place | None = None
    decode: Instance | None = None


NO_ENCODINGS = Encodings()
"""Those of a request without items."""

NO_TARGETS, NO_PROMPT = Targets(), Consumed({})


class Attempt(NamedTuple):
    """How a request is sent this time. `epd.request.recovery` derives the next one.

    Attributes:
        course: what runs for it.
        facts: what that was decided by.
        prefills: prefill instances that had it before, and are not chosen again while there are
            others.
        decodes: decode instances, likewise.
        failures: the stages that failed before; an instance that was not reached does not count.
        doubtful: a decode instance that failed as one does that cannot load what it was named: the
            stage before may have been at fault.
        encodings: encoder outputs that an earlier attempt got.
        resent: whether a prefill instance had the request before: connectors must not take what
            they remember of that attempt for this one.
        reencode: whether entries may have been lost: all items are encoded again, and their media
            go along.
        raw: whether all media go along, since an instance refused the metadata in their place.
        without_prefill: whether decode does prefill's work.
    """

    course: Course
    facts: Facts
    prefills: tuple[Instance, ...] = ()
    decodes: tuple[Instance, ...] = ()
    failures: tuple[Stage, ...] = ()
    doubtful: Instance | None = None
    encodings: Encodings | None = None
    resent: bool = False
    reencode: bool = False
    raw: bool = False
    without_prefill: bool = False


@dataclass(slots=True)
class Sending:
    """An attempt under way. Each field below `context` is set by the step that knows it.

    Attributes:
        attempt: how it goes out.
        context: the request's.
        targets: instances that were chosen before its items were encoded.
        encodings: the encoder outputs of its items; until they are known, `NOT_ENCODED` itself.
        prompt: what prefill and decode are sent.
        prefill: its place at the prefill instance that has it.
        decode: the decode instance that has it.
        reads_back: whether prefill was told to read decode's blocks of the previous turn.
        prefilled: whether decode was sent what a prefill instance made.
        accepted: whether decode has begun to answer, with a 2xx.
    """

    attempt: Attempt
    context: RequestContext
    targets: Targets = NO_TARGETS
    encodings: Encodings = NOT_ENCODED
    prompt: Consumed = NO_PROMPT
    prefill: Place | None = None
    decode: Instance | None = None
    reads_back: bool = False
    prefilled: bool = False
    accepted: bool = False

    def accept(self) -> None:
        """Note that decode has begun to answer."""
        self.accepted = True

    @property
    def decodes(self) -> tuple[Instance, ...]:
        """All decode instances that have had the request, in this attempt and before."""
        return self.attempt.decodes if self.decode is None else (*self.attempt.decodes, self.decode)

    def blames_instance(self, stage: Stage) -> bool:
        """Return whether a 500 of this stage is the instance's own fault.

        The first time, it may be that what it was told to load is not there.
        """
        loads = self.prefilled if stage == "decode" else self.reads_back
        return not (self.prompt.depends or loads) or stage in self.attempt.failures
