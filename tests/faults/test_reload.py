"""SIGHUP: keys and certificates are reloaded, or stay in force. Row 63, with real processes."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest

from epd.tenants import key_line
from tests.certificates import Authority
from tests.support.clients import ALICE, BOB
from tests.support.reloading import certificate, everywhere, gauge, models, proxy, reload
from tests.support.workers import lives, status

pytestmark = [pytest.mark.full, pytest.mark.fault(63), pytest.mark.parametrize("workers", [1, 2])]


async def test_api_keys_are_reloaded_and_an_invalid_file_changes_nothing(
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
                pass  # the values of another worker are up to a second old

    reasons = [line["reason"] for line in running.logged("not reloaded", level="error")]
    assert len(reasons) == 3 * workers
    assert f"{keys}: line 1" in reasons[0]
    assert "No such file" in reasons[-1]
    assert "SECRET" not in str(running.lines)


async def test_a_reload_without_files_keeps_the_configuration(workers: int) -> None:
    async with proxy(workers) as running:
        for pid in [running.process.pid, *running.pids()]:
            os.kill(pid, signal.SIGHUP)

        assert await everywhere(lambda: status(running.url, "/openapi.json")) == {200}
        assert all(map(lives, running.pids()))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
async def test_a_certificate_is_reloaded_and_an_invalid_one_changes_nothing(
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
