"""Fake instances and store that `chaos.py` runs behind the proxy, with fault injection."""

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import aiohttp

from ec_store import open_store
from epd.routing.instances import Role
from epd.tools.up.process import Process
from tests.support.redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"PYTHONPATH": str(ROOT)}
READY_S = 60.0
ASKED_WITHIN_S = 5.0

KINDS = ("kill", "stop", "sick", "error", "busy", "overloaded", "hang", "reset")
HALFWAY = ("break", "stall", "truncate", "dribble")
ROLE_KINDS: Mapping[Role, Sequence[str]] = {
    Role.ENCODE: (*KINDS, *HALFWAY, "nonsense"),
    Role.PREFILL: (*KINDS, *HALFWAY, "nonsense"),
    # A whole response of decode is relayed unchanged, so no "nonsense" here.
    Role.DECODE: (*KINDS, *HALFWAY),
    Role.PREFILL_DECODE: (*KINDS, *HALFWAY),
}


class Breakable(Protocol):
    """Target that faults can break."""

    @property
    def name(self) -> str:
        """Name in the report."""

    @property
    def role(self) -> str:
        """Role of an instance, or `store`."""

    @property
    def kinds(self) -> Sequence[str]:
        """Kinds of faults of the target."""

    def broken(self, kind: str) -> AbstractAsyncContextManager[None]:
        """Hold the target in this fault until the end of the context."""


class Instance:
    """Fake instance in a process, as a target of faults."""

    def __init__(self, role: Role, port: int, command: Sequence[str], log: Path) -> None:
        """Start the instance, which listens on one port for its life."""
        self.name, self.role, self.kinds = f"{role}-{port}", role.value, ROLE_KINDS[role]
        self.url = f"http://127.0.0.1:{port}"
        self._command, self._log = command, log
        self._process = self._started()

    def _started(self) -> Process:
        return Process(self.name, self.url, self._command, ENVIRONMENT, self._log)

    async def ready(self) -> None:
        await wait_for(self._process)

    def kill(self) -> None:
        self._process.kill()

    async def restart(self) -> None:
        """Start the instance again on the same port, and wait until it serves."""
        self._process = self._started()
        await self.ready()

    @asynccontextmanager
    async def broken(self, kind: str) -> AsyncIterator[None]:
        if kind == "kill":
            self.kill()
            yield
            await self.restart()
        elif kind == "stop":
            os.killpg(self._process.pid, signal.SIGSTOP)
            try:
                yield
            finally:
                os.killpg(self._process.pid, signal.SIGCONT)
        else:
            await self._told(kind)
            yield
            await self._told("")

    async def _told(self, kind: str) -> None:
        async with aiohttp.ClientSession() as http:
            await http.post(f"{self.url}/fault", data=kind, raise_for_status=True)

    async def state(self) -> Mapping[str, int]:
        """Return the numbers of open, kept and received requests."""
        timeout = aiohttp.ClientTimeout(ASKED_WITHIN_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.get(f"{self.url}/state") as reply,
        ):
            counts: Mapping[str, int] = await reply.json()
            return counts


class DiskStore:
    """Store in a shared folder, on a small separate file system if it may be mounted."""

    name = role = "store"

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._disk, self._store = folder, folder / "store"
        self.url = f"file://{self._store}?max_bytes=16MiB"
        mounted = _ran("mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder))
        self._mounted = mounted
        open_store(self.url).close()  # engines also open it when they start
        self.kinds = ("removed", "corrupt", *(("full", "read-only") if mounted else ()))

    @asynccontextmanager
    async def broken(self, kind: str) -> AsyncIterator[None]:
        match kind:
            case "removed":
                shutil.rmtree(self._store, ignore_errors=True)
                yield
            case "corrupt":
                self._corrupt()
                yield
            case "full":
                with self._filled():
                    yield
            case _:
                _ran("mount", "-o", "remount,bind,ro", str(self._disk))
                yield
                _ran("mount", "-o", "remount,bind,rw", str(self._disk))

    def _corrupt(self) -> None:
        """Flip a bit in the last byte of every entry."""
        for path in (self._store / "entries").rglob("*"):
            with suppress(OSError):  # just evicted, or a folder
                content = bytearray(path.read_bytes())
                content[-1] ^= 1
                path.chmod(0o600)
                path.write_bytes(content)

    @contextmanager
    def _filled(self) -> Iterator[None]:
        filler = self._disk / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:  # ENOSPC
            while True:
                file.write(bytes(4096))
        try:
            yield
        finally:
            filler.unlink()

    def claims(self) -> int:
        """Return the number of entries that a proxy claims now."""
        now_s = time.time()
        return sum(_ends_at(path) > now_s for path in (self._store / "claims").glob("*"))

    def close(self) -> None:
        if self._mounted:
            _ran("umount", "-l", str(self._disk))


class RedisStore:
    """Store in a separate Redis server without persistence."""

    name = role = "store"
    kinds = ("kill", "stop", "flush", "out of memory")

    def __init__(self, folder: Path) -> None:
        self._server = RedisServer(folder).start()
        self.url = self._server.url()

    @asynccontextmanager
    async def broken(self, kind: str) -> AsyncIterator[None]:
        match kind:
            case "kill":
                self._server.kill()
                yield
                self._server.start()
            case "stop":
                with self._server.paused():
                    yield
            case "flush":
                self._server.command("FLUSHALL")
                yield
            case _:
                self._server.command("CONFIG", "SET", "maxmemory", 1)
                yield
                self._server.command("CONFIG", "SET", "maxmemory", 0)

    def claims(self) -> int:
        """Return the number of entries that a proxy claims now."""
        return sum(1 for _ in self._server.client.scan_iter("*:c"))

    def close(self) -> None:
        self._server.kill()


async def wait_for(process: Process) -> None:
    """Wait until a process serves, at most `READY_S`."""
    async with asyncio.timeout(READY_S):
        while not await asyncio.to_thread(process.is_ready):
            process.check_alive()
            await asyncio.sleep(0.05)


def _ends_at(claim: Path) -> float:
    """Return the Unix time at which a claim expires; 0 if its link is gone or invalid."""
    try:
        return claim.lstat().st_mtime + float(str(claim.readlink()).partition(" ")[0])
    except (OSError, ValueError):
        return 0.0


def _ran(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, check=False, capture_output=True).returncode == 0
