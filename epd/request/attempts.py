"""A request's attempts so far, and what the next one has to do otherwise."""

from dataclasses import dataclass, field

from epd.errors import Stage
from epd.policies.course import Course, Facts
from epd.routing.instances import Instance
from epd.routing.use import Place
from epd.transfer.encoded import Consumed, EncodedItem


@dataclass(slots=True)
class Attempts:
    """Those of one request.

    Attributes:
        course: what runs for it.
        facts: what that was decided by.
        prefills: prefill instances that it was sent to.
        decodes: decode instances that it was sent to.
        failures: the stages that have failed; who was not reached has not been asked.
        doubtful: a decode instance that failed as one does that cannot load what it was named:
            who made that may be at fault.
        consumer: whom its items are encoded for; None: whoever comes to consume them.
        decode: who will answer, where that was asked before its items were encoded, and they are
            not encoded for it.
        encoded: its items, once they are encoded.
        sent: what prefill and decode were sent.
        anew: whether entries may have been lost: all is encoded again, and the media go along.
        prefilled: whether decode was sent what a prefill instance had made.
        without_prefill: whether decode does prefill's work.
        reads_back: whether the last prefill was to read decode's blocks of an earlier turn.
    """

    course: Course
    facts: Facts
    prefills: list[Instance] = field(default_factory=list)
    decodes: list[Instance] = field(default_factory=list)
    failures: list[Stage] = field(default_factory=list)
    doubtful: Instance | None = None
    consumer: Place | None = None
    decode: Instance | None = None
    encoded: list[EncodedItem] | None = None
    sent: Consumed = field(default_factory=lambda: Consumed({}))
    anew: bool = False
    prefilled: bool = False
    without_prefill: bool = False
    reads_back: bool = False

    def alone(self, stage: Stage) -> bool:
        """Whether a stage that fails now does so by itself: the first time, others may have."""
        given = self.prefilled if stage == "decode" else self.reads_back
        depends = self.sent.depends or given
        return not depends or stage in self.failures
