"""One sending of a request: its plan and its results. No I/O."""

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
        items: one output for each item.
        namespace: namespace of the consuming instance, if known.
        local_keys: keys of the items that prefill or decode encode themselves.
    """

    items: tuple[EncodedItem, ...] = ()
    namespace: str | None = None
    local_keys: tuple[str, ...] = ()


NOT_ENCODED = Encodings()
"""The value of an attempt that has not reached its encode."""


class Targets(NamedTuple):
    """Instances chosen before the items are encoded.

    Attributes:
        consumer: the instance that consumes the outputs, if they are pushed or consumers have
            different namespaces.
        decode: the decode instance, if it was chosen early and consumes no outputs.
    """

    consumer: Place | None = None
    decode: Instance | None = None


NO_ENCODINGS = Encodings()
"""The value of a request without items."""

NO_TARGETS, NO_PROMPT = Targets(), Consumed({})


class Attempt(NamedTuple):
    """The plan of one sending. `epd.request.recovery` derives the next one.

    Attributes:
        course: stages of the request.
        facts: facts by which the policies decided the course.
        prefills: prefill instances that have had the request. Others are preferred.
        decodes: decode instances that have had the request. Others are preferred.
        failures: stages that failed before. An unreachable instance does not count.
        doubtful: a decode instance that may have failed because of a missing entry or block, so
            that an earlier stage may be at fault.
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
    """An attempt in progress. Each field below `context` is set by the step that determines it.

    Attributes:
        attempt: the plan.
        context: context of the request.
        targets: instances chosen before the items were encoded.
        encodings: encoder outputs of the items; the object `NOT_ENCODED` until they exist.
        prompt: body for prefill and decode.
        prefill: place at the prefill instance that has the request.
        decode: the decode instance that has the request.
        reads_back: whether prefill was asked to read decode's blocks of the previous turn.
        prefilled: whether decode received parameters of a prefill instance.
        accepted: whether decode has begun a 2xx answer.
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
        """Record that decode has begun a 2xx answer."""
        self.accepted = True

    @property
    def decodes(self) -> tuple[Instance, ...]:
        """All decode instances that have had the request, in this and earlier attempts."""
        return self.attempt.decodes if self.decode is None else (*self.attempt.decodes, self.decode)

    def blames_instance(self, stage: Stage) -> bool:
        """Return whether a 500 of this stage is the instance's own fault.

        The first 500 of a stage that loads entries or blocks may mean that they are missing.
        """
        loads = self.prefilled if stage == "decode" else self.reads_back
        return not (self.prompt.depends or loads) or stage in self.attempt.failures
