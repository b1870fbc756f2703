"""The proxy detects a blocked event loop."""

import asyncio
import threading
import time

import pytest
import structlog

from epd.aio import Background
from epd.encoder_cache import identity, keys
from epd.media import parts as media_parts
from epd.media.parts import Inline
from epd.observe.loop_lag import watched
from epd.tenants import Scope
from tests.requests import image, input_audio, png, request
from tests.support.fleet import Launch, until

UNCOUNTED = Background(lambda *_: None)

pytestmark = pytest.mark.fault(65)


async def test_a_blocked_event_loop_is_measured_and_logged_once() -> None:
    lags: list[float] = []
    with structlog.testing.capture_logs() as lines:
        async with watched(lags.append, UNCOUNTED, window_s=0.5):
            for _ in range(2):
                await asyncio.sleep(0.05)
                time.sleep(0.2)  # noqa: ASYNC251 - the fault
            await until(lambda: lags)

    assert 0.15 < lags[0] < 5
    [line] = [line for line in lines if line["event"] == "the event loop was held up"]
    assert line["log_level"] == "warning"
    assert line["seconds"] == round(lags[0], 3)


async def test_a_window_forgets_the_one_before() -> None:
    lags: list[float] = []
    async with watched(lags.append, UNCOUNTED, window_s=0.3):
        await asyncio.sleep(0)
        time.sleep(1)  # noqa: ASYNC251 - the fault
        await until(lambda: len(lags) > 1)

    assert lags[0] > 0.9
    assert lags[1] < lags[0]


async def test_loop_lag_is_not_reported_after_the_context() -> None:
    lags: list[float] = []
    async with watched(lags.append, UNCOUNTED, window_s=0.05):
        await until(lambda: lags)
    told = len(lags)
    await asyncio.sleep(0.2)

    assert len(lags) == told


async def test_metrics_have_it() -> None:
    async with Launch()() as fleet, fleet.http.get(f"{fleet.url}/metrics") as reply:
        assert "\nepd_event_loop_lag_seconds " in await reply.text()


@pytest.mark.parametrize(("items", "off_the_loop"), [(2, False), (40, True)])
async def test_media_are_inspected_off_the_loop_by_their_total_size(
    monkeypatch: pytest.MonkeyPatch, items: int, off_the_loop: bool
) -> None:
    """With a limit per item, many items just below it could block the loop together."""
    threads = set[threading.Thread]()

    def content_key(scope: Scope, modality: str, media: Inline) -> str:
        threads.add(threading.current_thread())
        return identity.content_key(scope, modality, media)

    monkeypatch.setattr(keys, "content_key", content_key)
    async with Launch()() as fleet:
        content = b"x" * (keys.IN_THREAD // 32)
        parts = [image(content), *[input_audio(content)] * (items - 1)]
        assert (await fleet.chat(request(*parts)))[0] == 200

    assert len(threads) == 1
    assert (threading.main_thread() not in threads) is off_the_loop


async def test_a_picture_that_comes_often_is_inspected_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inspected: list[bytes] = []

    def check_image(media: Inline, **limits: int) -> int:
        inspected.append(bytes(media.base64))
        return media_parts.check_image(media, **limits)

    monkeypatch.setattr(keys, "check_image", check_image)
    async with Launch()() as fleet:
        cat, dog = image(png(4, 4)), image(png(5, 5))
        assert (await fleet.chat(request(cat, dog, cat, cat, dog)))[0] == 200

    assert len(inspected) == len({*inspected}) == 2
