"""Inputs of the stages of a request. No I/O."""

from collections.abc import Sequence
from typing import NamedTuple

from epd.api.items import Body, MMItem
from epd.errors import Stage
from epd.policies.plan import Course
from epd.request.context import RequestContext
from epd.request.recovery import Attempt, Encodings
from epd.routing.instances import Instance
from epd.routing.prefix import NO_PREFIX, Prefix
from epd.routing.table import NO_WORK, Reservation, Work
from epd.transfer.encoded import Consumed


class EarlyTargets(NamedTuple):
    """Instances chosen before the items are encoded.

    Attributes:
        consumer_reservation: reservation of the instance that consumes the outputs, if they are
            pushed or consumers have different namespaces.
        decode: the decode instance, if it was chosen early and consumes no outputs.
    """

    consumer_reservation: Reservation | None = None
    decode: Instance | None = None

    @property
    def consumer(self) -> Instance | None:
        return None if self.consumer_reservation is None else self.consumer_reservation.instance

    @property
    def consumer_rank(self) -> int | None:
        """Data-parallel rank of the request at the consumer, if the proxy names one."""
        return None if self.consumer_reservation is None else self.consumer_reservation.rank


NO_TARGETS = EarlyTargets()


class KeyedRequest(NamedTuple):
    """Client's request with the media that the proxy fetched, and its items in order, with keys."""

    body: Body
    media_items: Sequence[MMItem] = ()


class StageInput(NamedTuple):
    """Input of the stages: a request, the plan of one attempt, and the context."""

    request: KeyedRequest
    attempt: Attempt
    context: RequestContext


class PreparedRequest(NamedTuple):
    """Request as prefill and decode get it.

    Early choices of instances use one without encoder outputs.

    Attributes:
        consumed: body for prefill and decode.
        prefix: content of the prompt, if instances are chosen by it.
        work: predicted work of the instance that prefills.
    """

    stage_input: StageInput
    encodings: Encodings
    consumed: Consumed
    prefix: Prefix = NO_PREFIX
    work: Work = NO_WORK

    @property
    def prefill_prefix(self) -> Prefix:
        chosen = self.stage_input.context.config.prefill_balance == "content"
        return self.prefix if chosen else NO_PREFIX

    @property
    def decode_prefix(self) -> Prefix:
        chosen = self.stage_input.context.config.decode_balance == "content"
        return self.prefix if chosen else NO_PREFIX

    def may_lack_state(self, stage: Stage, *, loads_blocks: bool) -> bool:
        """Return whether a 500 of this stage may mean that an entry or KV blocks are missing.

        Only the first 500 of a stage may.
        """
        loads = self.consumed.depends or loads_blocks
        return loads and stage not in self.stage_input.attempt.failures


class EncodeJob(NamedTuple):
    """Items of one request, each of which needs an encoder output.

    Attributes:
        consumer_reservation: reservation of the instance that gets the outputs, if chosen early.
        namespace: namespace of the consumer, if known.
        reencode: whether to ignore stored outputs, because a consumer could not load them.
    """

    request: KeyedRequest
    context: RequestContext
    course: Course = Course()
    consumer_reservation: Reservation | None = None
    namespace: str | None = None
    reencode: bool = False

    @property
    def has_all_media(self) -> bool:
        """Whether the request contains the media of all its items, so that all can be sent raw."""
        return all(item.has_media for item in self.request.media_items)
