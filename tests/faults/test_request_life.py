"""Random sequences of instance behaviours, with clients that disconnect at any moment."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.requests import image, request, text
from tests.support.fake_instance import (
    FakeInstance,
    Handler,
    chunk,
    decodes,
    drops,
    encodes,
    encodes_without_params,
    hangs,
    prefills,
    refuses,
    streams_then,
)
from tests.support.fleet import Fleet, until
from tests.support.invariants import WatchedLaunch, lost

LIMIT_S = 0.15
"""Seconds for each wait for an instance, except for an answer without a stream."""
LIFE_S = 3.0
"""Seconds for a whole request, the only limit of an answer without a stream."""


async def talks_nonsense(_: web.Request, __: dict[str, Any]) -> web.Response:
    return web.Response(text='{"half', content_type="application/json")


def begins_and(then: Handler) -> Handler:
    return streams_then(chunk("a"), b'data: {"ha', then=then)


ANYWHERE: dict[str, Handler] = {
    "500": refuses(500),
    "503": refuses(503),
    "429": refuses(429),
    "400": refuses(400),
    "hangs": hangs,
    "resets": drops,
    "nonsense": talks_nonsense,
}
BEHAVIOURS: dict[str, dict[str, Handler]] = {
    "encode": {"ok": encodes, "says nothing": encodes_without_params, **ANYWHERE},
    "prefill": {"ok": prefills, **ANYWHERE},
    "decode": {
        "ok": decodes,
        "dies": begins_and(drops),
        "stalls": begins_and(hangs),
        "stops": begins_and(talks_nonsense),
        **ANYWHERE,
    },
}
ROLES = tuple(BEHAVIOURS)


def behave(instance: FakeInstance, behaviours: Sequence[Handler]) -> None:
    """Let an instance behave in these ways in turn, and correctly afterwards."""
    right, queue = instance.chat, list(behaviours)

    async def chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (queue.pop(0) if queue else right)(request, body)

    instance.chat = chat


def nexts(role: str) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(sorted(BEHAVIOURS[role])), max_size=3)


class RequestLife(RuleBasedStateMachine):
    """State machine with a request or two per rule; the invariants are checked after each rule."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.sent = 0

    @initialize(topology=st.sampled_from([(1, 1, 1), (2, 0, 1)]))
    def start(self, topology: tuple[int, int, int]) -> None:
        async def begin() -> Fleet:
            self.launched = WatchedLaunch()(
                *topology,
                encode_timeout_s=LIMIT_S,
                prefill_timeout_s=LIMIT_S,
                first_byte_timeout_s=LIMIT_S,
                idle_timeout_s=LIMIT_S,
                request_timeout_s=LIFE_S,
            )
            return await self.launched.__aenter__()

        self.fleet = self.loop.run(begin())
        self.rights = {id(each): each.chat for each in self.fleet.instances}

    def teardown(self) -> None:
        try:
            if hasattr(self, "fleet"):
                self.loop.run(self.launched.__aexit__(None, None, None))
        finally:
            self.loop.close()

    def script(self, behaviours: dict[str, list[str]]) -> None:
        for role, names in behaviours.items():
            for instance in getattr(self.fleet, role):
                instance.chat = self.rights[id(instance)]
                behave(instance, [BEHAVIOURS[role][name] for name in names])

    @rule(
        behaviours=st.fixed_dictionaries({role: nexts(role) for role in ROLES}),
        stream=st.booleans(),
        items=st.integers(0, 2),
    )
    def client_waits(self, behaviours: dict[str, list[str]], stream: bool, items: int) -> None:
        self.script(behaviours)
        self.loop.run(self.answered(self.body(stream, items)))
        self.check()

    @rule(
        behaviours=st.fixed_dictionaries({role: nexts(role) for role in ROLES}),
        stream=st.booleans(),
        role=st.sampled_from(ROLES),
        later_s=st.sampled_from([0, 0.01, 0.1]),
    )
    def client_leaves(
        self, behaviours: dict[str, list[str]], stream: bool, role: str, later_s: float
    ) -> None:
        self.script(behaviours)
        self.loop.run(self.left(self.body(stream, 2), role, later_s))
        self.check()

    def body(self, stream: bool, items: int) -> dict[str, Any]:
        self.sent += 1
        pictures = [image(f"{self.sent}:{n}".encode()) for n in range(items)]
        return request(*pictures, text(), stream=stream)

    async def answered(self, body: dict[str, Any]) -> None:
        async with asyncio.timeout(60), self.fleet.post(body) as reply:
            content = await reply.read()
            kind = reply.content_type
        if reply.status == 200 and kind == "text/event-stream":
            done = content.endswith(b"data: [DONE]\n\n")
            assert done != (b'data: {"error":' in content), content
        # Other statuses were checked on arrival.

    async def left(self, body: dict[str, Any], role: str, later_s: float) -> None:
        instances = getattr(self.fleet, role)
        calls = sum(len(each.calls) for each in instances)
        task = asyncio.create_task(self.answered(body))

        def reached() -> bool:
            return task.done() or sum(len(each.calls) for each in instances) > calls

        await until(reached, 60)
        await asyncio.sleep(later_s)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    def check(self) -> None:
        """Check that each request has one outcome, and that nothing is in progress."""
        settled: Callable[[], bool] = lambda: (  # noqa: E731
            len(self.fleet.events.requests) == self.sent
            and not any(each.open for each in self.fleet.instances)
        )
        self.loop.run(until(settled, 60))  # a release alone may take `RELEASE_TIMEOUT_S`
        assert lost(self.fleet) == 0


RequestLife.TestCase.settings = settings(
    max_examples=8,
    stateful_step_count=6,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
TestRequestLife = RequestLife.TestCase
