"""Who decodes a request: found in the table of instances."""

from collections.abc import Collection

from epd.policies.course import Course
from epd.request.context import RequestContext
from epd.routing.balance import Choice
from epd.routing.instances import ANSWERING, Instance, InstanceTable


class Decoders:
    """Names the decode instance of each request."""

    def __init__(self, table: InstanceTable) -> None:
        self._choice = Choice(table, "least_load", *ANSWERING)

    async def pick(
        self,
        course: Course,  # noqa: ARG002
        context: RequestContext,  # noqa: ARG002
        tried: Collection[Instance],
    ) -> Instance:
        """Who decodes, one that was not tried where there is one.

        Raises:
            NoInstance: there is none.
        """
        return self._choice.best(tried=tried)

    def others(self, course: Course, tried: Collection[Instance]) -> bool:  # noqa: ARG002
        """Whether there is one that was not tried."""
        return self._choice.others(tried)

    def another(self, tried: Collection[Instance]) -> Instance:
        """One of the table, not tried where there is one, to be told of something.

        Raises:
            NoInstance: there is none.
        """
        return self._choice.best(tried=tried)
