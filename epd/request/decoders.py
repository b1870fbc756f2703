"""Who decodes a request: found in the table of instances."""

from collections.abc import Collection

from epd.config import ProxyConfig
from epd.policies.course import Course
from epd.request.context import RequestContext
from epd.routing.balance import Choice
from epd.routing.instances import ANSWERING, Instance, InstanceTable


class Decoders:
    """Names the decode instance of each request."""

    def __init__(self, table: InstanceTable, config: ProxyConfig) -> None:
        self._choice = Choice(table, lambda: config.decode_balance, *ANSWERING)

    async def pick(
        self,
        course: Course,  # noqa: ARG002
        context: RequestContext,
        tried: Collection[Instance],
    ) -> Instance:
        """Who decodes, one that was not tried where there is one.

        Raises:
            NoInstance: there is none.
        """
        return self._choice.best(tried, session=context.session)

    def others(self, course: Course, tried: Collection[Instance]) -> bool:  # noqa: ARG002
        """Whether there is one that was not tried."""
        return self._choice.others(tried)

    def another(self, tried: Collection[Instance]) -> Instance:
        """One of the table, not tried where there is one, to be told of something.

        Raises:
            NoInstance: there is none.
        """
        return self._choice.best(tried)
