"""First tries of a request's items at encode instances: spread by cost, and grouped.

The items of a request that need an encode instance at the same moment are assigned to instances
together (`GroupPlanner`). Those with the same instance may share one request (`FirstTries`). If a
shared request fails, each of its items goes on alone, by the rules for a failed try of its own.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from epd.aio import Flights
from epd.api.items import MMItem
from epd.errors import ProxyError
from epd.request.attempts import EncodeJob, FirstTry, PlannedJob, item_key
from epd.routing.balance import Choice
from epd.routing.fatal import FatalRequests
from epd.routing.instances import Instance
from epd.transfer.encoded import Encoded

GROUPED = frozenset({"image", "audio"})
"""Modalities of the items that may share a request. A video may have a second output, its sound."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodeGroup:
    """Items of one encode request. Equal only to itself.

    Attributes:
        instance: the encode instance.
        items: the items, in order; of one modality if there are several.
        tokens: their predicted encoder tokens.
    """

    instance: Instance
    items: tuple[MMItem, ...]
    tokens: int


Send = Callable[[EncodeGroup], Coroutine[Any, Any, Sequence[Encoded]]]
"""Function that sends the request of a group, and returns the output of each item."""

Plan = Callable[[Sequence[MMItem]], Sequence[EncodeGroup]]
"""Function that assigns items to instances. Each item is in one group."""


class GroupPlanner:
    """Assigns the items of requests to encode instances. Belongs to one event loop."""

    def __init__(self, choice: Choice, fatal: FatalRequests) -> None:
        self._choice = choice
        self._fatal = fatal

    def first_try(
        self, planned: PlannedJob, fits: Callable[[Instance], bool] | None, send: Send
    ) -> FirstTry | None:
        """Return the first try of a job with several items; None if each item is sent by itself.

        Args:
            planned: the job.
            fits: predicate of the instances that can serve it; None for all.
            send: function that sends the request of a group.
        """
        config = planned.job.context.config
        if config.encode_group_items == 1 and config.encode_balance != "least_load":
            return None
        return FirstTries(partial(self._plan_groups, planned, fits), send).encode_item

    def _plan_groups(
        self,
        planned: PlannedJob,
        fits: Callable[[Instance], bool] | None,
        items: Sequence[MMItem],
    ) -> Sequence[EncodeGroup]:
        """Assign items to instances, and group those with the same instance and modality.

        Raises:
            NoInstance: there is no instance.
        """
        job, context = planned.job, planned.job.context
        plans = {item: planned.plan_of(item) for item in items}
        instances = self._choice.spread_items(
            [item_key(item, job.uuids[item]) for item in items],
            [plan.tokens for plan in plans.values()],
            [plan.instance for plan in plans.values()],
            balance=context.config.encode_balance,
            session=context.session,
            fits=fits,
        )
        together: dict[object, list[MMItem]] = {}
        for item, instance in zip(items, instances, strict=True):
            shared = (instance, item.modality) if self._may_share(job, item) else item
            together.setdefault(shared, []).append(item)
        at, most = dict(zip(items, instances, strict=True)), context.config.encode_group_items
        return [
            EncodeGroup(at[some[0]], tuple(some), sum(plans[item].tokens for item in some))
            for members in together.values()
            for some in (members[first : first + most] for first in range(0, len(members), most))
        ]

    def _may_share(self, job: EncodeJob, item: MMItem) -> bool:
        """Return whether an item may share its request.

        Media that an instance has to fetch would delay the others, or fail them. An item that may
        have killed an instance must be blamed alone.
        """
        watched, key = job.context.watched, item_key(item, job.uuids[item])
        suspect = watched.deaths is not None or self._fatal.is_suspect(watched, key)
        return item.modality in GROUPED and not item.is_remote and not suspect


class FirstTries:
    """First tries of one request's items, which arrive one by one."""

    def __init__(self, plan: Plan, send: Send) -> None:
        self._plan = plan
        self._send = send
        self._arrived: list[MMItem] = []
        self._groups: dict[MMItem, EncodeGroup] = {}
        self._flights: Flights[EncodeGroup, Sequence[Encoded]] = Flights()

    async def encode_item(self, item: MMItem, tried: list[Instance]) -> Encoded | None:
        """Return the output of an item; None if its group was rejected, so that it must go alone.

        Args:
            item: the item.
            tried: instances that had the item; the one of this try is added, unless it rejected the
                group.

        Raises:
            ProxyError: the instance failed, or rejected the item alone.
        """
        group = await self._group_of(item)
        tried.append(group.instance)
        if len(group.items) == 1:
            [encoded] = await self._send(group)
            return encoded
        try:
            # The request ends when none of its items is needed any more.
            outputs = await self._flights.join(group, partial(self._send, group))
        except ProxyError as failure:
            if failure.retryable or failure.died:
                raise
            tried.pop()
            return None
        return outputs[group.items.index(item)]

    async def _group_of(self, item: MMItem) -> EncodeGroup:
        """Return the group of an item.

        The items of a request that do not wait for anything else arrive in the same turn of the
        event loop. One turn later they are assigned together.
        """
        self._arrived.append(item)
        try:
            await asyncio.sleep(0)
            if item not in self._groups:
                new = [item for item in self._arrived if item not in self._groups]
                self._groups |= {item: group for group in self._plan(new) for item in group.items}
        finally:
            self._arrived.remove(item)
        return self._groups[item]
