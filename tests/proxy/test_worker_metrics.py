"""`/metrics` of `epd serve --workers`: any worker reports the sum over all. Real processes."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from epd.tenants import key_line
from tests.requests import request, text
from tests.support.clients import ALICE, bearer
from tests.support.fake_instance import FakeInstance, encodes, hangs
from tests.support.fleet import until
from tests.support.reloading import everywhere, proxy, reload
from tests.support.workers import START_S, Workers, some_workers, status

pytestmark = pytest.mark.full

ASKED = ("epd_requests_total", (("model_name", ""), ("path", "unknown"), ("status", "404")))
INSIDE = ("epd_requests_in_flight", ())
RELOADED = ("epd_config_last_reload_success", ())

Figures = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def figures(url: str, key: str = "none") -> Figures:
    """Return the metrics of the worker behind a new connection."""
    async with (
        aiohttp.ClientSession(headers=bearer(key)) as http,
        http.get(f"{url}/metrics") as reply,
    ):
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(await reply.text())
            for sample in family.samples
        }


async def scraped(workers: Workers, times: int = 12) -> list[Figures]:
    return [await figures(workers.url) for _ in range(times)]


async def shown(workers: Workers, enough: Callable[[Figures], bool]) -> None:
    """Wait until all workers report it; a worker polls the others each second."""
    async with asyncio.timeout(START_S):
        while not all(map(enough, await scraped(workers))):
            pass


async def ask(workers: Workers, times: int) -> None:
    statuses = await asyncio.gather(*(status(workers.url) for _ in range(times)))

    assert statuses == [404] * times


async def test_every_worker_shows_the_sum_of_all() -> None:
    async with some_workers(3) as workers:
        await ask(workers, 48)
        await shown(workers, lambda page: page[ASKED] == 48)
        pages = await scraped(workers)
        asked, scrapes = (
            {line["worker"] for line in workers.logged("request", path=path)}
            for path in ("unknown", "/metrics")
        )

    assert asked == scrapes == {1, 2, 3}
    assert {page[ASKED] for page in pages} == {48}
    assert {page[RELOADED] for page in pages} == {1}
    assert all(set(page) >= {INSIDE, ("epd_event_loop_lag_seconds", ())} for page in pages)


async def test_counters_survive_a_killed_worker_and_its_replacement_continues_them() -> None:
    async with some_workers(3) as workers:
        await ask(workers, 48)
        await shown(workers, lambda page: page[ASKED] == 48)
        [killed] = workers.pids(worker=1)
        os.kill(killed, signal.SIGKILL)
        await until(lambda: workers.logged("worker died"), START_S)
        while len(workers.pids(worker=1)) == 1:
            assert (await figures(workers.url))[ASKED] == 48

        assert {page[ASKED] for page in await scraped(workers)} == {48}
        await ask(workers, 48)
        await shown(workers, lambda page: page[ASKED] == 96)
        served = {line["worker"] for line in workers.logged("request", path="unknown")[48:]}

    assert served == {1, 2, 3}
    assert workers.rest == ""


async def test_gauges_of_a_worker_end_with_it() -> None:
    encode, decode = FakeInstance(encodes), FakeInstance(hangs)
    async with encode.running(), decode.running():
        flags = ["--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url]
        async with some_workers(3, *flags) as workers:
            chats = [asyncio.create_task(chat(workers.url)) for _ in range(24)]
            await until(lambda: len(decode.calls) == 24, START_S)
            await shown(workers, lambda page: page[INSIDE] == 24)

            [killed] = workers.pids(worker=1)
            os.kill(killed, signal.SIGKILL)
            await until(lambda: workers.logged("worker died"), START_S)
            pages = await asyncio.gather(*(figures(workers.url) for _ in range(12)))
            # Also before the replacement has started.
            assert max(page[INSIDE] for page in pages) < 24
            await until(lambda: decode.open < 24, START_S)
            await shown(workers, lambda page: page[INSIDE] == decode.open)
            left = decode.open
            assert sum(task.done() for task in chats) == 24 - left
            for task in chats:
                task.cancel()
            await shown(workers, lambda page: page[INSIDE] == 0)
            await asyncio.wait(chats)

    assert 0 < left < 24
    assert workers.rest == ""


async def chat(url: str) -> int:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", json=request(text())) as reply,
    ):
        return reply.status


@pytest.mark.fault(63)
async def test_a_failed_reload_of_one_worker_is_in_the_metrics_of_all(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(key_line("alice", ALICE))
    keys.chmod(0o600)
    async with proxy(3, "--api-keys-file", str(keys)) as running:
        keys.write_text("no key\n")
        await reload(running, 3, "not reloaded")
        for worker in (1, 2):
            [pid] = running.pids(worker=worker)
            os.kill(pid, signal.SIGKILL)
        await until(lambda: len(running.pids()) == 5, START_S)
        await all_show(running.url, 0)

        [pid] = running.pids(worker=3)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(running.pids(worker=3)) == 2, START_S)
        await all_show(running.url, 1)

    assert len(running.logged("worker died")) == 3


async def all_show(url: str, success: int) -> None:
    """Wait until all workers report it; values of other workers are up to a second old."""
    async with asyncio.timeout(START_S):
        while await everywhere(lambda: reloaded(url)) != {success}:  # noqa: ASYNC110 - the workers set no event
            await asyncio.sleep(0.1)


async def reloaded(url: str) -> float:
    return (await figures(url, ALICE))[RELOADED]
