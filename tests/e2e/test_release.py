"""Prefills that nobody fetches, on real engines: their blocks are free before their lease ends."""

import asyncio
import signal
import time

import httpx
import openai
import pytest

from epd.fleet import Engine
from epd.instances import Role
from tests.e2e.conftest import Served, metric
from tests.e2e.stacks import DISK, E_P_D, VISION, Spec, on
from tests.e2e.test_answers import ask
from tests.requests import request, text

DONE = "vllm:request_success_total"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
LEASE_S = 30
"""After which vLLM's NIXL connector frees blocks that nobody has fetched, and counts that."""


async def leave_after_prefill(stack: Served, prefill: Engine) -> None:
    before = metric(prefill, DONE)
    body = request(text("long " * 400), max_tokens=8, stream=True) | {"model": stack.model}
    async with httpx.AsyncClient(timeout=60) as client:
        chat = asyncio.create_task(client.post(f"{stack.stack.url}/v1/chat/completions", json=body))
        while await asyncio.to_thread(metric, prefill, DONE) == before:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)
        assert not chat.done()
        chat.cancel()


@pytest.mark.fault(36, 44)
@on(Spec(VISION, E_P_D, DISK))
def test_prefills_that_nobody_wants_are_given_back(stack: Served) -> None:
    [prefill], [decode] = stack.stack.of(Role.PREFILL), stack.stack.of(Role.DECODE)
    ask(stack.client, stack.model, text("warm"))
    expired = metric(prefill, EXPIRED)
    stack.stack.signal(decode, signal.SIGSTOP)
    try:
        asyncio.run(leave_after_prefill(stack, prefill))
    finally:
        stack.stack.signal(decode, signal.SIGCONT)
    # Prefill is asked for one token, and decode for none, which it refuses before its engine knows.
    with pytest.raises(openai.BadRequestError):
        ask(stack.client, stack.model, text("long " * 400), max_tokens=0)

    over = time.monotonic() + 1.2 * LEASE_S
    while time.monotonic() < over:
        ask(stack.client, stack.model, text("an engine looks at its leases as it steps"))
        time.sleep(1)
    assert metric(prefill, EXPIRED) == expired
