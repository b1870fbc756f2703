"""Stack with engines that are forked from one process that has imported vLLM.

An engine imports vLLM twice, in its API server and in its core. For a tiny model, the imports take
most of the start. Forked engines are ready in a quarter of that time.
"""

import functools
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from epd.tools.up.engine import FETCHES_ONCE, FleetServer
from epd.tools.up.platforms import CPU, OFFLINE
from epd.tools.up.process import Process
from epd.tools.up.settings import VLLM
from epd.tools.up.stack import Fleet
from scripts.forking import ForkedProgram, next_program, start_server
from scripts.network import enter_network
from scripts.stack import Stack

SHARED_SERVER = "VLLM_FORK_SERVER"
"""Variable with the socket of a fork server that several test processes use."""

NETWORK = "VLLM_FORK_NETWORK"
"""Variable with the path of the network namespace that a forked engine enters."""

PRELOADED = [
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.generate.structured_decisions.api_router",
    "vllm.entrypoints.launchers.run_batch",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.qwen2_5_vl",
    "vllm.model_executor.models.qwen2_audio",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "mistral_common.tokens.tokenizers.mistral",
    "model_hosting_container_standards.sagemaker",
    "sympy.tensor.tensor",
    "torch.distributed.tensor.experimental",
    "scripts.preloaded",
]


class ForkedFleet(Fleet):
    """Fleet with forked engines. Its proxy is started as a program."""

    def launch(self, server: FleetServer, log: Path) -> Process:
        """Fork an engine, or start the proxy."""
        engines = {engine.name for engine in self.plan.engines}
        if server.name not in engines:
            return super().launch(server, log)
        return ForkedProcess(server, log)


class ForkedStack(ForkedFleet, Stack):
    """Stack with forked engines."""


class ForkedProcess(Process):
    """vLLM server in its own process group, forked and not executed."""

    def __init__(self, server: FleetServer, log: Path) -> None:
        """Fork the server with its output to a log."""
        self.name = server.name
        self.url = server.url
        self.log = log
        environment = {**os.environ, **server.environment}
        with log.open("wb") as output:
            self._popen = fork_vllm(server.command[len(VLLM) :], environment, output.fileno())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and its children. The fork server has reaped an ended one."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _exit_code(self) -> int | None:
        return self._popen.poll()


def fork_vllm(
    arguments: Sequence[str], environment: Mapping[str, str], output: int
) -> ForkedProgram:
    """Fork `vllm` in its own process group, with its output to a descriptor."""
    return ForkedProgram(vllm_server(), arguments, environment, output, own_group=True)


@functools.cache
def vllm_server() -> Path:
    """Return the socket of the fork server of `vllm`: the shared one, or one of this process."""
    shared = os.environ.get(SHARED_SERVER)
    return Path(shared) if shared else start_server(__name__)


def main() -> None:
    """Serve requests; in a forked program, run `vllm`.

    All programs share the values that libraries read from this environment at import.
    """
    os.environ.update({**OFFLINE, **FETCHES_ONCE, **CPU.environment, **os.environ})
    for module in PRELOADED:
        importlib.import_module(module)
    request = next_program(Path(sys.argv[1]))
    status = 0
    if request is not None:
        if network := os.environ.get(NETWORK):
            enter_network(Path(network))
        status = _run_vllm(request["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    # Python's own exit frees all objects, which copies the memory that programs share with the
    # server: 4 s of CPU time for each engine.
    os._exit(status)


def _run_vllm(arguments: Sequence[str]) -> int:
    """Run `vllm` in this process, and return its exit status."""
    sys.argv = ["vllm", *arguments]
    entry: Any = sys.modules["vllm.entrypoints.cli.main"]
    # On a CPU vLLM spawns an engine's core and its ranks, which would import everything again.
    for name in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
        starts: Any = sys.modules[name]
        starts.get_mp_context = lambda: multiprocessing.get_context("fork")
    inspect_in_process()
    try:
        entry.main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else bool(end.code)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def inspect_in_process() -> None:
    """Have vLLM inspect the classes of models in this process.

    It starts a process for each class and imports itself there, to keep CUDA out of this one.
    """
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda inspect: inspect()  # noqa: SLF001


if __name__ == "__main__":
    main()
