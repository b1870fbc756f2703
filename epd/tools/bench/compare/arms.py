"""Arms of a comparison: fleets that `epd up` starts, one after the other."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from types import MappingProxyType

from epd.tools.bench.compare.load import MODEL
from epd.tools.bench.compare.verdict import PLAIN
from epd.tools.up.devices import LETTERS
from epd.tools.up.process import STOP_TIMEOUT_S, Process, stop, wait_until_ready
from epd.tools.up.settings import Topology
from epd.tools.up.stack import FRONT_STOP_TIMEOUT_S, STORE_STOP_TIMEOUT_S

EPD = (sys.executable, "-m", "epd")
ARMS: Mapping[str, str] = MappingProxyType(
    {PLAIN: "1pd", "cache": "1epd", "epd": "1e1pd", "e+p+d": "1e1p1d"}
)
"""Topologies by arm. `plain` is the engine of 1pd: its requests bypass the proxy."""
_LONGEST_STOP_S = FRONT_STOP_TIMEOUT_S + STOP_TIMEOUT_S + STORE_STOP_TIMEOUT_S + 5
_READY = re.compile(r"^ready: (\S+)", re.MULTILINE)
_ENGINE = re.compile(r"^starting prefill-decode-\S+: (\S+),", re.MULTILINE)


class _Up(Process):
    """Process of `epd up`, which is ready when its output says so."""

    def is_ready(self) -> bool:
        return self.url_in(_READY) is not None

    def url_in(self, pattern: re.Pattern[str]) -> str | None:
        found = pattern.search(self.log.read_text(errors="replace"))
        return found and found[1]


@contextmanager
def running(
    arm: str, model: str, flags: Sequence[str], folder: Path, report: Callable[[str], None]
) -> Iterator[str]:
    """Start an arm, yield the URL to ask, and stop it.

    Its output is in the folder. `flags` are those of `epd up`.

    Raises:
        ProcessDied: it did not start; the message has the end of its output.
    """
    words = (
        *(*EPD, "up", "--model", model, "--served-model-name", MODEL),
        *("--topology", ARMS[arm], "--log-path", str(folder / arm), *flags),
    )
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{arm}.log"
    log.unlink(missing_ok=True)
    process = _Up(arm, "", words, {}, log)
    try:
        wait_until_ready([process], inf, report)
        url = process.url_in(_ENGINE if arm == PLAIN else _READY)
        if url is None:
            raise RuntimeError(f"{log} has no URL of {arm}")
        yield url
    finally:
        stop(([process], _LONGEST_STOP_S))


def has_store(arm: str) -> bool:
    """Return whether the fleet of an arm has a store."""
    return Topology.parse(ARMS[arm]).uses_store


def gpus_of(arm: str, gpus: str) -> Sequence[str]:
    """Return the flag with the devices of the stages that an arm has: `e=0,pd=1`."""
    roles = Topology.parse(ARMS[arm]).roles
    stages = [letters for letters, role in LETTERS.items() if role in roles]
    named = [entry for entry in gpus.split(",") if entry.partition("=")[0] in stages]
    return ["--gpus", ",".join(named)] if named else []
