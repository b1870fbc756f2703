"""The proxy with the memory of another host, over TCP: hits, and a server that is killed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ec_store import open_store
from tests.ec_store.arena.remote import KEY, free_port
from tests.proxy.test_arena_store import is_hit, is_served_without_store
from tests.requests import image, request
from tests.support.backed import Backed, caching, items_of, refresh_stores, registered
from tests.support.fleet import Launch, until


@contextmanager
def served(path: Path, port: int, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `ec-store serve --listen`."""
    command = [sys.executable, "-m", "ec_store", "serve", f"shm://{path}?max_bytes=16MiB"]
    with subprocess.Popen(
        [*command, "--port", "0", "--listen", f"127.0.0.1:{port}", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.fault(153)
async def test_a_killed_server_of_another_host_costs_hits_and_no_request(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EC_STORE_API_KEY", KEY)
    refresh_stores(monkeypatch, 0.2, skip_s=0.2)
    path, port = tmp_path / "arena.sock", free_port()
    with open_store(f"shm://{path}?timeout=20s") as store:
        backed = Backed(store, tmp_path)
        with served(path, port) as process:
            await until(lambda: registered(store))
            url = f"shm+tcp://127.0.0.1:{port}?timeout=20s"
            async with caching(launch, backed, url) as fleet:
                assert await items_of(fleet, request(image(b"new"))) == {"encoded": 1}
                await is_hit(fleet, backed)
                process.kill()
                process.wait()
                await is_served_without_store(fleet)
                with served(path, port):
                    await until(lambda: registered(store))
                    await is_hit(fleet, backed)
