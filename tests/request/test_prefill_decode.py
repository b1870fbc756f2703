"""Concurrent prefill and decode of one attempt."""

import asyncio
from contextlib import suppress

import pytest

from epd.errors import ProxyError, UpstreamDied, UpstreamFailed
from epd.request.prefill_decode import DIES_WITHIN_S, wait_both

pytestmark = pytest.mark.fault(68)


def died(stage: str) -> UpstreamDied:
    return UpstreamDied("it broke", slug=f"{stage}_failed")


async def ended(
    prefill: float,
    decode: float | None,
    error: Exception | None = None,
    dies_within_s: float = DIES_WITHIN_S,
) -> list[str]:
    """Let each half die after its delay; return the deaths that were observed."""
    seen: list[str] = []

    async def half(stage: str, delay_s: float | None) -> None:
        if delay_s is None:
            await asyncio.Event().wait()
        else:
            await asyncio.sleep(delay_s)
        seen.append(stage)
        raise error or died(stage)

    prefilling = asyncio.create_task(half("prefill", prefill))
    decoding = asyncio.create_task(half("decode", decode))
    with suppress(ProxyError):
        await wait_both(prefilling, decoding, dies_within_s)
    return seen


async def test_a_death_a_moment_after_the_other_is_seen() -> None:
    assert await ended(0.0, 0.05) == ["prefill", "decode"]
    assert await ended(0.05, 0.0) == ["decode", "prefill"]


async def test_the_surviving_stage_is_cancelled_after_the_death_of_the_other() -> None:
    assert await ended(0.0, None, dies_within_s=0.05) == ["prefill"]


async def test_other_failures_cancel_the_other_half_at_once() -> None:
    assert await ended(0.0, 0.05, UpstreamFailed("it said 500")) == ["prefill"]
