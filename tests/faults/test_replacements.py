"""A replacement worker has the keys and certificates of the last reload. Row 63, real processes."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from epd.tenants import key_line
from tests.certificates import Authority
from tests.support.clients import ALICE, BOB
from tests.support.fleet import until
from tests.support.reloading import certificate, everywhere, models, proxy, reload
from tests.support.workers import START_S, Workers

pytestmark = [pytest.mark.full, pytest.mark.fault(63)]


async def replaced(running: Workers) -> None:
    """Kill the first worker, and wait for its replacement."""
    before = running.pids(worker=1)
    os.kill(before[-1], signal.SIGKILL)
    await until(lambda: len(running.pids(worker=1)) > len(before), START_S)


async def test_a_replacement_has_the_keys_that_are_in_force(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(key_line("alice", ALICE))
    keys.chmod(0o600)
    async with proxy(2, "--api-keys-file", str(keys)) as running:
        keys.write_text(key_line("bob", BOB))
        await replaced(running)  # without a signal to reload the file
        assert await everywhere(lambda: models(running.url, ALICE)) == {502}

        await reload(running, 2, "reloaded")
        keys.write_text("no key\n")
        await reload(running, 2, "not reloaded")
        await replaced(running)
        assert await everywhere(lambda: models(running.url, BOB)) == {502}
        assert await everywhere(lambda: models(running.url, ALICE)) == {401}

        keys.unlink()
        await replaced(running)
        assert await everywhere(lambda: models(running.url, BOB)) == {502}

        keys.write_text(key_line("alice", ALICE))
        await reload(running, 2, "reloaded")
        assert await everywhere(lambda: models(running.url, ALICE)) == {502}

    assert {line["of"] for line in running.logged("worker died")} == {"signal 9"}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
async def test_a_replacement_has_the_certificate_that_is_in_force(tmp_path: Path) -> None:
    authority = Authority.made(tmp_path)
    served, renewed = authority.issue(name="served"), authority.issue(name="renewed")
    others = tmp_path / "others.pem"
    others.write_bytes(authority.ca.read_bytes())
    cas = ["--ssl-ca-certs", str(others), "--ssl-cert-reqs", "1", "--upstream-ca-file", str(others)]
    async with proxy(2, *served.flags, *cas) as running:
        port = int(running.url.rpartition(":")[2])
        first = await everywhere(lambda: certificate(port, authority))
        served.chain.write_bytes(renewed.chain.read_bytes())
        served.key.write_bytes(renewed.key.read_bytes())
        await reload(running, 2, "reloaded")

        served.key.write_text("no PEM\n")
        others.unlink()
        await reload(running, 2, "not reloaded")
        await replaced(running)
        second = await everywhere(lambda: certificate(port, authority))

    assert len(first) == len(second) == 1
    assert first != second
    assert {line["of"] for line in running.logged("worker died")} == {"signal 9"}
