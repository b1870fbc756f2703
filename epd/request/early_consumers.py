"""Consumers of encoder outputs that must be known before the encode.

There are two cases: the transfer pushes outputs to the consumer, or consumers have different
namespaces, so that an output is usable in only one of them. Without pushes and without a store,
there is neither.
"""

from dataclasses import dataclass

from epd.request.prefill_decode import PrefillDecodeStages, needs_prefill
from epd.request.prefix import request_prefix
from epd.request.recovery import Attempt
from epd.request.request import Request
from epd.routing.instances import CONSUMERS, Role
from epd.routing.namespaces import Namespaces
from epd.routing.prefix import NO_PREFIX
from epd.routing.table import InstanceTable, Reservation


@dataclass(frozen=True, slots=True, eq=False)
class EarlyConsumers:
    """Choice of consumers before the encode, and the namespaces in which they look up outputs.

    `_pushed` tells whether the transfer pushes outputs, and `_by_content` whether instances are
    chosen by the content of prompts.
    """

    _table: InstanceTable
    _namespaces: Namespaces
    _prefill_decode: PrefillDecodeStages
    _pushed: bool
    _by_content: bool

    async def choose(self, request: Request, attempt: Attempt) -> Reservation | None:
        """Return the instance that gets the prompt; None: choose it after the encode.

        A decode instance consumes no outputs, but a picker is asked only once for it.

        Raises:
            ProxyError: no instance is available, or the choice failed.
        """
        differ = attempt.course.encode and len(self._namespaces.of_consumers()) > 1
        if not request.items or not (self._pushed or differ):
            return None
        if not needs_prefill(request, attempt) and not self._table.has(Role.PREFILL_DECODE):
            return None
        prefix = request_prefix(request) if self._by_content else NO_PREFIX
        return await self._prefill_decode.choose_first(request, attempt, prefix)

    def namespace(self, first: Reservation | None) -> str | None:
        """Return the namespace in which the consumer looks up outputs; None if unknown."""
        if first is not None and first.instance.role in CONSUMERS:
            return self._namespaces.namespace_of(first.instance)
        known = self._namespaces.of_consumers()
        return next(iter(known)) if len(known) == 1 else None
