"""Stacks whose engines are forked from one process that has imported vLLM.

An engine imports vLLM twice, in its API server and in its core, which is most of the time that a
tiny model takes to start. Forked engines are ready in a quarter of it.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from epd.tools.fleet.engine import VLLM, Server
from epd.tools.fleet.process import Process
from epd.tools.fleet.stack import Stack

PRELOADED = [
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
]


class ForkedStack(Stack):
    """A stack whose engines are forked; its proxy is a program like any other."""

    def launch(self, server: Server, log: Path) -> Process:
        """Fork an engine, or start the proxy."""
        engines = {engine.name for engine in self.engines}
        if server.name not in engines:
            return super().launch(server, log)
        process = ForkedProcess(server, log)
        if self._guard is not None:
            self._guard.watch(process.pid)
        return process


class ForkedProcess(Process):
    """A vLLM server in a process group of its own, forked and not executed."""

    def __init__(self, server: Server, log: Path) -> None:
        """Fork it.

        Args:
            server: what is started.
            log: where its output goes.
        """
        self.name = server.name
        self.url = server.url
        self.log = log
        log.touch()
        environment = {**os.environ, **server.environment}
        process = fork_server(environment).Process(
            target=serve, args=(server.command[len(VLLM) :], environment, log)
        )
        process.start()
        self._popen = Forked(process)  # type: ignore[assignment]


class Forked:
    """What `Process` uses of a `subprocess.Popen`."""

    def __init__(self, process: BaseProcess) -> None:
        self.pid: int = process.pid  # type: ignore[assignment]  # it is started
        self._process = process

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, and return its exit status.

        Raises:
            subprocess.TimeoutExpired: it runs after `timeout` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("vllm", timeout or 0)
        return self._process.exitcode


def fork_server(environment: Mapping[str, str]) -> ForkServerContext:
    """The process that has imported vLLM; started by the first call, with this environment.

    What libraries read of the environment when they are imported is the same for all engines.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    own = dict(os.environ)
    os.environ.update(environment)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(own)
    return context


def serve(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Be a vLLM server, in a child of the fork server."""
    os.setsid()
    with log.open("wb") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["vllm", *arguments]
    entry: Any = sys.modules["vllm.entrypoints.cli.main"]
    # On a CPU vLLM spawns the core of an engine and its ranks, which would import all of it again.
    for name in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
        starts: Any = sys.modules[name]
        starts.get_mp_context = lambda: multiprocessing.get_context("fork")
    entry.main()
