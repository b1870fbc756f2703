"""Arms of a comparison: fleets that `epd up` starts, one after the other."""

import json
import re
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from epd.tools.bench.compare.load import MODEL
from epd.tools.bench.compare.verdict import PLAIN
from epd.tools.up.devices import LETTERS, parse_gpus
from epd.tools.up.process import STOP_TIMEOUT_S, Process, stop, wait_until_ready
from epd.tools.up.stack import FRONT_STOP_TIMEOUT_S, STORE_STOP_TIMEOUT_S
from epd.tools.up.topology import Topology
from epd.tools.up.vllm_flags import flag_value

EXAMPLE = "example"
EPD = (sys.executable, "-m", "epd")
ARMS: Mapping[str, str] = MappingProxyType(
    {PLAIN: "1pd", "cache": "1epd", "epd": "1e1pd", "e+p+d": "1e1p1d", EXAMPLE: "1e1pd"}
)
"""Topologies by arm. `plain` is the engine of 1pd: its requests bypass the proxy. `example` has the
engines of 1e1pd with another connector, behind vLLM's example proxy."""
_LONGEST_STOP_S = FRONT_STOP_TIMEOUT_S + STOP_TIMEOUT_S + STORE_STOP_TIMEOUT_S + 5
_PROXY_READY_S = 60.0
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - files of the example connector
_READY = re.compile(r"^ready: (\S+)", re.MULTILINE)
_ENGINE = re.compile(r"^starting prefill-decode-\S+: (\S+),", re.MULTILINE)
_ENCODE = re.compile(r"^starting encode-\S+: (\S+),", re.MULTILINE)


class _Up(Process):
    """Process of `epd up`, which is ready when its output says so."""

    def is_ready(self) -> bool:
        return bool(self.url_in(_READY))

    def url_in(self, pattern: re.Pattern[str]) -> str:
        """Return the URL that a line of the output has; empty: there is no such line yet."""
        found = pattern.search(self.log.read_text(errors="replace"))
        return found[1] if found else ""


@contextmanager
def running(  # noqa: PLR0913, PLR0917 - all that an arm consists of
    arm: str,
    model: str,
    flags: Sequence[str],
    folder: Path,
    example: Path | None,
    report: Callable[[str], None],
) -> Iterator[tuple[str, Sequence[Process]]]:
    """Start an arm, yield the URL to ask and its processes, and stop it.

    Its output is in the folder. `flags` are those of `epd up`; `example` is vLLM's example proxy.

    Raises:
        ProcessDied: it did not start; the message has the end of its output.
        TimeoutError: vLLM's example proxy was not ready in time.
    """
    with ExitStack() as stack:
        if arm == EXAMPLE:
            memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
            shared = stack.enter_context(TemporaryDirectory(prefix="epd-compare-", dir=memory))
            flags = [*flags, *_example_flags(flags, shared)]
        words = (
            *(*EPD, "up", "--model", model, "--served-model-name", MODEL),
            *("--topology", ARMS[arm], "--log-path", str(folder / arm), *flags),
        )
        up = _Up(arm, "", words, {}, _new_log(folder, arm))
        processes: list[Process] = [up]
        stack.callback(_stop, up, _LONGEST_STOP_S)
        wait_until_ready([up], inf, report)
        url = up.url_in(_ENGINE if arm == PLAIN else _READY)
        if arm == EXAMPLE:
            url = f"http://127.0.0.1:{_free_port()}"
            command = (
                *(sys.executable, str(example), "--port", url.rpartition(":")[2]),
                *("--encode-servers-urls", up.url_in(_ENCODE), "--prefill-servers-urls", "disable"),
                *("--decode-servers-urls", up.url_in(_ENGINE)),
            )
            proxy = Process("example-proxy", url, command, {}, _new_log(folder, "example-proxy"))
            processes.append(proxy)
            stack.callback(_stop, proxy, FRONT_STOP_TIMEOUT_S)
            wait_until_ready(processes, _PROXY_READY_S, report)
        yield url, processes


def _stop(process: Process, timeout_s: float) -> None:
    """Stop a process. A time limit that ends meanwhile waits: it is not a second Ctrl-C."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        stop(([process], timeout_s))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])


def _new_log(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    log.unlink(missing_ok=True)
    return log


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _example_flags(flags: Sequence[str], shared: str) -> Iterator[str]:
    """Yield the flags of `epd up` with which engines use vLLM's connector over a shared folder.

    Of a repeated flag, vLLM uses the last value.
    """
    for flag, role in (("--encode-flags", "ec_producer"), ("--decode-flags", "ec_consumer")):
        config = {
            "ec_connector": "ECExampleConnector",
            "ec_role": role,
            "ec_connector_extra_config": {"shared_storage_path": shared},
        }
        given = flag_value(flags, flag) or ""
        yield f"{flag}={given} --ec-transfer-config {shlex.quote(json.dumps(config))}"


def has_store(arm: str) -> bool:
    """Return whether the fleet of an arm has a store, and a proxy that reports its hits."""
    return arm != EXAMPLE and Topology.parse(ARMS[arm]).uses_store


def gpus_of(arm: str, gpus: str) -> Sequence[str]:
    """Return the flag with the devices of the stages that an arm has: `e=0,pd=1`.

    Raises:
        ValueError: the devices are of another form, or lack a stage of the arm.
    """
    roles, named = Topology.parse(ARMS[arm]).roles, parse_gpus(gpus)
    stages = {letters: role for letters, role in LETTERS.items() if role in roles}
    if missing := [letters for letters, role in stages.items() if role not in named]:
        raise ValueError(f"names no device for {', '.join(missing)} of arm {arm}")
    own = (word for word in gpus.split(",") if word.partition("=")[0].strip().lower() in stages)
    return ["--gpus", ",".join(own)]
