"""Stack with engines that are forked from one process that has imported vLLM.

An engine imports vLLM twice, in its API server and in its core. For a tiny model, the imports take
most of the start. Forked engines are ready in a quarter of that time.
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

from epd.tools.fleet.engine import VLLM, FleetServer
from epd.tools.fleet.process import Process
from epd.tools.fleet.stack import Stack

PRELOADED = [
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "scripts.preloaded",
]


class ForkedStack(Stack):
    """Stack with forked engines. Its proxy is started as a program."""

    def launch(self, server: FleetServer, log: Path) -> Process:
        """Fork an engine, or start the proxy."""
        engines = {engine.name for engine in self.all_engines}
        if server.name not in engines:
            return super().launch(server, log)
        process = ForkedProcess(server, log)
        if self._guard is not None:
            self._guard.watch(process.pid)
        return process


class ForkedProcess(Process):
    """vLLM server in its own process group, forked and not executed."""

    def __init__(self, server: FleetServer, log: Path) -> None:
        """Fork the process.

        Args:
            server: server to start.
            log: file for its output.
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
    """Forked process with the methods of `subprocess.Popen` that `Process` uses."""

    def __init__(self, process: BaseProcess) -> None:
        self.pid: int = process.pid  # type: ignore[assignment]  # it has been started
        self._process = process

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return its exit status.

        Raises:
            subprocess.TimeoutExpired: the process still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("vllm", timeout or 0)
        return self._process.exitcode


def fork_server(environment: Mapping[str, str]) -> ForkServerContext:
    """Return the context of the process that has imported vLLM; the first call starts it.

    The process has the environment of the first call. All engines therefore share the values that
    libraries read at import.
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
    """Run a vLLM server in a child of the fork server."""
    os.setsid()
    with log.open("wb") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["vllm", *arguments]
    entry: Any = sys.modules["vllm.entrypoints.cli.main"]
    # On a CPU vLLM spawns an engine's core and its ranks, which would import everything again.
    for name in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
        starts: Any = sys.modules[name]
        starts.get_mp_context = lambda: multiprocessing.get_context("fork")
    entry.main()
