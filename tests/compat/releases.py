"""The last release beside this one: its code from the history, its programs as processes.

The entry points of stores and transfers are in the metadata of the installed package, also for a
process of the last release: a release that reads them must find its own modules by the same names.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

LAST_RELEASE = "f214ce040cd895157d6e9b5c7d59f69099469913"
"""Commit or tag of the last release: 0.1.0, which was never published. A release changes this."""

STORE_PROGRAM = Path(__file__).parent / "store_program.py"
LIMIT_S = 60.0


@dataclass(frozen=True)
class Release:
    """Code of a release, in a folder."""

    name: str
    root: Path

    def __str__(self) -> str:
        return self.name

    @property
    def environment(self) -> Mapping[str, str]:
        """Return variables with which Python imports this release in every process.

        Lines of `--help` are not wrapped.
        """
        mine = {"PYTHONPATH": str(self.root), "PYTHONSAFEPATH": "1", "COLUMNS": "1000"}
        return os.environ | mine

    def run(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a module, such as `ec_store stat URL`, to its end."""
        return subprocess.run(
            [sys.executable, "-m", *words],
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )

    def value(self, module: str, expression: str) -> str:
        """Return what an expression of a module's names is in this release, as text."""
        code = f"from {module} import *; print({expression})"
        command = [sys.executable, "-c", code]
        return subprocess.check_output(command, env=self.environment, text=True).strip()

    @contextmanager
    def process(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Start a module, with pipes; kill it at the end."""
        process = subprocess.Popen(
            [sys.executable, *words],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    @contextmanager
    def proxy(self, *flags: str) -> Iterator["Proxy"]:
        """Run `epd serve` on a free port; yield it once it listens."""
        address = ["--host", "127.0.0.1", "--port", "0", "--drain-delay-s", "0"]
        words = ["-m", "epd", "serve", *address, "--log-format", "json", *flags]
        with ExitStack() as stack:
            process = stack.enter_context(self.process(*words))
            lines: list[dict[str, Any]] = []
            assert process.stderr is not None
            for line in process.stderr:
                lines.append(json.loads(line))
                if lines[-1]["event"] == "listening":
                    break
            else:
                raise AssertionError(f"{self.name}: {lines}")
            # The proxy would wait for a reader once the pipe is full. The process ends first.
            reading = ThreadPoolExecutor(1)
            stack.callback(reading.shutdown)
            stack.callback(process.kill)
            reading.submit(lambda: lines.extend(map(json.loads, process.stderr or ())))
            yield Proxy(lines[-1]["url"], lines)

    @contextmanager
    def store(self, url: str) -> Iterator["StoreProcess"]:
        """Open a store in a process of this release, as an engine does."""
        with self.process(str(STORE_PROGRAM), url) as process:
            yield StoreProcess(process)

    @contextmanager
    def memory(self, socket: Path) -> Iterator[str]:
        """Run `ec-store serve` for the memory of a host; yield the URL of the store."""
        url = f"shm://{socket}"
        words = ["-m", "ec_store", "serve", f"{url}?max_bytes=64MiB", "--port", "0"]
        with self.process(*words) as process:
            assert process.stderr is not None
            started = process.stderr.readline()
            assert "64.0 MiB" in started, started
            yield url


@dataclass(frozen=True)
class Proxy:
    """Running proxy: its URL, and the lines that it has logged."""

    url: str
    lines: Sequence[Mapping[str, Any]]


class Refused(Exception):
    """Error of a store in another process: the name of its class, and its text."""


class StoreProcess:
    """Store that is open in a process of a release. Each method is that of `Store`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method with JSON arguments; a store's error becomes `Refused`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([method, *arguments]), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise Refused(f"{answer['error']}: {answer['text']}")
        return answer["result"]


def this_release() -> Release:
    return Release("this", ROOT)


def last_release(folder: Path) -> Release:
    """Unpack the last release; skip the test if the clone does not have its commit."""
    git = ["git", "-C", str(ROOT)]
    archive = folder / "release.tar"
    command = [*git, "archive", f"--output={archive}", LAST_RELEASE, "epd", "ec_store"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip(
            f"no {LAST_RELEASE} in this clone, the last release: `git fetch --unshallow --tags`"
        )
    root = folder / "last"
    root.mkdir()
    subprocess.run(["tar", "-xf", str(archive), "-C", str(root)], check=True)  # noqa: S607
    return Release("last", root)
