"""A client that leaves between prefill and decode, on real engines."""

import asyncio
import signal
import time

import httpx
import pytest

from epd.fleet import Engine
from epd.instances import Role
from tests.e2e.conftest import Served, metric
from tests.e2e.stacks import DISK, E_P_D, VISION, Spec, on
from tests.e2e.test_answers import ask
from tests.requests import request, text

BLOCKS = "vllm:kv_cache_usage_perc"
DONE = "vllm:request_success_total"


def kept(stack: Served, prefill: Engine) -> float:
    """How much of its KV cache the prefill engine holds, which it says as it steps."""
    ask(stack.client, stack.model, text("step"))
    return metric(prefill, BLOCKS)


async def leave_after_prefill(stack: Served, prefill: Engine, words: str) -> None:
    before = metric(prefill, DONE)
    body = request(text(words), max_tokens=8, stream=True) | {"model": stack.model}
    async with httpx.AsyncClient(timeout=60) as client:
        chat = asyncio.create_task(client.post(f"{stack.stack.url}/v1/chat/completions", json=body))
        while await asyncio.to_thread(metric, prefill, DONE) == before:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)
        assert not chat.done()
        chat.cancel()


@pytest.mark.fault(44)
@on(Spec(VISION, E_P_D, DISK))
def test_a_client_that_leaves_between_prefill_and_decode_leaves_no_blocks(stack: Served) -> None:
    [prefill], [decode] = stack.stack.of(Role.PREFILL), stack.stack.of(Role.DECODE)
    ask(stack.client, stack.model, text("warm"))
    at_rest = kept(stack, prefill)
    stack.stack.signal(decode, signal.SIGSTOP)
    try:
        asyncio.run(leave_after_prefill(stack, prefill, "long " * 400))
        time.sleep(1)
    finally:
        stack.stack.signal(decode, signal.SIGCONT)

    deadline = time.monotonic() + 30
    while kept(stack, prefill) > at_rest:
        assert time.monotonic() < deadline
        time.sleep(0.5)
