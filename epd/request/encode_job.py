"""Input of the encode stage of a request. Pure."""

from typing import NamedTuple

from epd.policies.plan import Course
from epd.request.request import Request
from epd.routing.table import Reservation


class EncodeJob(NamedTuple):
    """Items of one request, each of which needs an encoder output.

    Attributes:
        consumer_reservation: reservation of the instance that gets the outputs, if chosen early.
        namespace: namespace of the consumer, if known.
        reencode: whether to ignore stored outputs, because a consumer could not load them.
    """

    request: Request
    course: Course = Course()
    consumer_reservation: Reservation | None = None
    namespace: str | None = None
    reencode: bool = False

    @property
    def has_all_media(self) -> bool:
        """Whether the request contains the media of all its items, so that all can be sent raw."""
        return all(item.has_media for item in self.request.items)
