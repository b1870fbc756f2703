"""First tries of a request's items, and their assignment to instances."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

import epd
from epd.api.chat import CHAT
from epd.errors import NoInstance
from epd.request.context import RequestContext
from epd.request.encode_tries import EncodeGroup, EncodeLimits, EncodeTask, FirstTries
from epd.request.stage_inputs import EncodeJob, ItemPlan, KeyedRequest
from epd.routing.balance import Choice
from epd.routing.instances import Instance, Role
from epd.routing.load import Report
from epd.routing.table import InstanceTable, Work
from epd.transfer.encoded import OutputFacts
from tests.requests import image, request

E1, E2 = (Instance(Role.ENCODE, f"http://e{number}:1") for number in (1, 2))


def tasks(count: int) -> list[EncodeTask]:
    body = request(*(image(b"%d" % number) for number in range(count)))
    items = [*CHAT.items(body)]
    config = epd.ProxyConfig(encode_servers_urls=(E1.url,), decode_servers_urls=("http://d:1",))
    job = EncodeJob(KeyedRequest(body, items), RequestContext("r", {}, config))
    limits = EncodeLimits(math.inf)
    return [EncodeTask(job, item, None, ItemPlan(1), True, limits) for item in items]


class Sent:
    """Assignment of one group for all items, and the items of each group that was sent."""

    def __init__(self) -> None:
        self.groups: list[tuple[EncodeTask, ...]] = []
        self.tries = FirstTries(self.assign_all, self.send_group)

    def assign_all(self, some: Sequence[EncodeTask]) -> list[EncodeGroup]:
        return [EncodeGroup(E1, tuple(some))]

    async def output_of(self, task: EncodeTask) -> OutputFacts:
        return await self.tries.output_of(task, await self.tries.group_of(task))

    async def send_group(self, group: EncodeGroup) -> list[OutputFacts]:
        self.groups.append(group.tasks)
        await asyncio.sleep(0)
        return [OutputFacts(identifier=task.item.param_path) for task in group.tasks]


async def test_an_item_that_arrives_later_is_not_grouped() -> None:
    (first, second, late), sent = tasks(3), Sent()

    async def waits(task: EncodeTask) -> OutputFacts:
        await asyncio.sleep(0.01)
        return await sent.output_of(task)

    await asyncio.gather(sent.output_of(first), sent.output_of(second), waits(late))

    assert sent.groups == [(first, second), (late,)]


async def test_an_item_without_an_instance_is_not_sent_with_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (*lost, later), sent = tasks(3), Sent()

    def assign_none(_: Sequence[EncodeTask]) -> Any:
        raise NoInstance("there is none")

    with monkeypatch.context() as patched:
        patched.setattr(sent.tries, "_assign", assign_none)
        failed = await asyncio.gather(*map(sent.output_of, lost), return_exceptions=True)
    await sent.output_of(later)

    assert [type(one) for one in failed] == [NoInstance] * 2
    assert sent.groups == [(later,)]


def spread(table: InstanceTable, *costs: float) -> list[Instance]:
    keys = [str(number) for number in range(len(costs))]
    prefer = [None] * len(costs)
    return Choice(table, Role.ENCODE).spread_items(keys, costs, prefer, balance="least_load")


def test_least_load_counts_the_work_of_this_process_by_its_cost() -> None:
    table = InstanceTable([E1, E2])
    with table.track_request(E1, work=Work(0, 20)):
        assert spread(table, 5, 5) == [E2, E2]


def test_least_load_keeps_an_item_at_its_preferred_instance() -> None:
    choice = Choice(InstanceTable([E1, E2]), Role.ENCODE)
    urls = [E2.url, E2.url, None]

    assert choice.spread_items("abc", [1, 1, 9], urls, balance="least_load") == [E2, E2, E1]


def test_least_load_counts_a_request_of_others_as_an_item() -> None:
    table = InstanceTable([E1, E2])
    load = table.load(E1)
    load.report_due(0.0, 1.0)
    load.record_report(Report(waiting=2, running=0, engines={0: 2}), 0.0, 1.0)

    assert spread(table, 5, 5) == [E2, E2]


def test_items_have_no_instance_where_none_fits() -> None:
    with pytest.raises(NoInstance, match="namespace"):
        Choice(InstanceTable([E1]), Role.ENCODE).spread_items(
            ["a"], [1], [None], balance="least_load", fits=lambda _: False
        )
