"""Concurrent prefill and decode of one attempt."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from epd.encoder_cache.claims import Claim
from epd.errors import ProxyError, UpstreamDied, UpstreamFailed
from epd.request.prefill_decode import DIES_WITHIN_S, DecodeAnswer, wait_both
from epd.routing.fatal import Watched


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


@pytest.mark.fault(68)
async def test_a_death_a_moment_after_the_other_is_seen() -> None:
    assert await ended(0.0, 0.05) == ["prefill", "decode"]
    assert await ended(0.05, 0.0) == ["decode", "prefill"]


@pytest.mark.fault(68)
async def test_the_surviving_stage_is_cancelled_after_the_death_of_the_other() -> None:
    assert await ended(0.0, None, dies_within_s=0.05) == ["prefill"]


@pytest.mark.fault(68)
async def test_other_failures_cancel_the_other_half_at_once() -> None:
    assert await ended(0.0, 0.05, UpstreamFailed("it said 500")) == ["prefill"]


def test_an_abandoned_answer_leaves_the_claims_to_the_next_attempt() -> None:
    ends = list[bool]()
    claim = cast("Claim", SimpleNamespace(end=lambda *, entry_coming: ends.append(entry_coming)))
    reply: Any = SimpleNamespace(close=lambda: None)
    in_flight: Any = SimpleNamespace(end_request=lambda _: None)
    fatal: Any = SimpleNamespace(record_survival=lambda *_: None)
    answer = DecodeAnswer(reply, None, None, {}, in_flight, fatal, Watched(), (), [claim])

    answer.close(asyncio.CancelledError())
    assert ends == []

    with answer:
        pass
    assert ends == [True]
