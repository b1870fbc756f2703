"""SIGHUP: what is read anew, and what cannot be. Row 63, with real processes."""

import asyncio
import os
import shutil
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from epd.tenants import key_line
from tests.certificates import Authority
from tests.proxy.clients import ALICE, BOB, bearer
from tests.proxy.fleet import until
from tests.proxy.test_process import INSTANCES, serving
from tests.proxy.test_workers import Workers, lives, status

GAUGE = "epd_config_last_reload_success"

pytestmark = [pytest.mark.fault(63), pytest.mark.parametrize("workers", [1, 2])]


@asynccontextmanager
async def proxy(workers: int, *flags: str) -> AsyncIterator[Workers]:
    with serving(*INSTANCES, "--workers", str(workers), *flags) as (url, process):
        running = Workers(url, process)
        reading = asyncio.create_task(running.read())
        try:
            if workers > 1:
                await until(lambda: len(running.pids()) == workers, 120)
            yield running
            process.terminate()
            assert await running.ended() == 0
        finally:
            process.kill()
            await reading
    assert running.rest == ""


async def everywhere(ask: Callable[[], Awaitable[object]]) -> set[object]:
    """The answers of many connections: each worker has some of them."""
    return set(await asyncio.gather(*(ask() for _ in range(12))))


async def reload(running: Workers, workers: int, event: str) -> None:
    before = len(running.logged(event))
    running.process.send_signal(signal.SIGHUP)
    await until(lambda: len(running.logged(event)) == before + workers, 120)


async def models(url: str, key: str) -> int:
    """401 where the key is none; else 502, there being no instance."""
    async with (
        aiohttp.ClientSession(headers=bearer(key)) as http,
        http.get(f"{url}/v1/models") as reply,
    ):
        return reply.status


async def gauge(url: str, key: str) -> float:
    async with (
        aiohttp.ClientSession(headers=bearer(key)) as http,
        http.get(f"{url}/metrics") as reply,
    ):
        [line] = [one for one in (await reply.text()).splitlines() if one.startswith(GAUGE)]
        return float(line.split()[1])


async def test_api_keys_are_read_anew_and_a_wrong_file_changes_nothing(
    workers: int, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(key_line("alice", ALICE))
    keys.chmod(0o600)
    async with proxy(workers, "--api-keys-file", str(keys)) as running:
        assert await everywhere(lambda: gauge(running.url, ALICE)) == {1}
        assert await everywhere(lambda: models(running.url, BOB)) == {401}

        keys.write_text(key_line("bob", BOB))
        await reload(running, workers, "reloaded")
        assert await everywhere(lambda: models(running.url, BOB)) == {502}
        assert await everywhere(lambda: models(running.url, ALICE)) == {401}

        for wrong in ("sk-SECRET\n", ""):
            keys.write_text(wrong)
            await reload(running, workers, "not reloaded")
            assert await everywhere(lambda: models(running.url, BOB)) == {502}
            assert await everywhere(lambda: gauge(running.url, BOB)) == {0}
        keys.unlink()
        await reload(running, workers, "not reloaded")

        keys.write_text(key_line("alice", ALICE))
        await reload(running, workers, "reloaded")
        assert await everywhere(lambda: models(running.url, ALICE)) == {502}
        async with asyncio.timeout(120):
            while await everywhere(lambda: gauge(running.url, ALICE)) != {1}:
                pass  # a worker shows what another said a second ago

    reasons = [line["reason"] for line in running.logged("not reloaded", level="error")]
    assert len(reasons) == 3 * workers
    assert f"{keys}: line 1" in reasons[0]
    assert "No such file" in reasons[-1]
    assert "SECRET" not in str(running.lines)


async def test_with_nothing_to_read_it_goes_on(workers: int) -> None:
    async with proxy(workers) as running:
        for pid in [running.process.pid, *running.pids()]:
            os.kill(pid, signal.SIGHUP)

        assert await everywhere(lambda: status(running.url, "/openapi.json")) == {200}
        assert all(map(lives, running.pids()))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
async def test_a_certificate_is_read_anew_and_a_wrong_one_changes_nothing(
    workers: int, tmp_path: Path
) -> None:
    authority = Authority.made(tmp_path)
    served, renewed = authority.issue(name="served"), authority.issue(name="renewed")
    async with proxy(workers, *served.flags) as running:
        port = running.url.rpartition(":")[2]
        first = await everywhere(lambda: certificate(int(port), authority))

        served.chain.write_bytes(renewed.chain.read_bytes())  # without its key
        await reload(running, workers, "not reloaded")
        assert await everywhere(lambda: certificate(int(port), authority)) == first

        served.key.write_bytes(renewed.key.read_bytes())
        await reload(running, workers, "reloaded")
        second = await everywhere(lambda: certificate(int(port), authority))

    assert len(first) == len(second) == 1
    assert first != second


async def certificate(port: int, authority: Authority) -> bytes | None:
    """What a new connection is shown."""
    trust = ssl.create_default_context(cafile=authority.ca)
    _, writer = await asyncio.open_connection("localhost", port, ssl=trust)
    shown: ssl.SSLObject = writer.get_extra_info("ssl_object")
    writer.close()
    return shown.getpeercert(binary_form=True)
