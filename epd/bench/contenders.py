"""Proxies to measure: each is a command line, run as a process."""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from epd.fleet import Process

PYTHON = shlex.quote(sys.executable)
EPD = (
    f"{PYTHON} -m epd serve --port {{port}} --encode-servers-urls {{encode_urls}} "
    "--prefill-servers-urls {prefill_urls} --decode-servers-urls {decode_urls} "
    "--ec-store {ec_store} --drain-delay-s 0"
)
RELAY = f"{PYTHON} -m epd.bench.relay {{port}} {{decode_urls}}"
NAME = re.compile(r"[\w.+-]+", re.ASCII)
PLACES = ("port", "encode_urls", "prefill_urls", "decode_urls", "ec_store")


@dataclass(frozen=True, slots=True)
class Contender:
    """Name and command line of a proxy.

    Attributes:
        name: name in the results.
        command: words of the command line, with placeholders such as `{port}`.
    """

    name: str
    command: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `name=command line`.

        Raises:
            ValueError: the text has another form, the name is not valid in a file name, or a
                placeholder is unknown.
        """
        name, equals, command = text.partition("=")
        words = tuple(shlex.split(command))
        if not NAME.fullmatch(name) or not equals or not words:
            raise ValueError(f"{text!r} is not of the form name=command")
        with_places = dict.fromkeys(PLACES, "")
        for word in words:
            try:
                word.format(**with_places)
            except (AttributeError, LookupError, ValueError):
                known = ", ".join(f"{{{place}}}" for place in PLACES)
                raise ValueError(f"{word!r} has a placeholder other than {known}") from None
        return cls(name, words)

    def argv(self, places: Mapping[str, str]) -> list[str]:
        """Return the command line with its placeholders filled."""
        return [word.format(**places) for word in self.command]


class Measured:
    """Running contender, bound to its own cores."""

    def __init__(
        self, contender: Contender, places: Mapping[str, str], log: Path, cores: set[int]
    ) -> None:
        """Start the contender, and bind it to the cores.

        Args:
            contender: proxy to start.
            places: values of the placeholders.
            log: file for its output.
            cores: numbers of the cores.
        """
        self.name = contender.name
        self.url = f"http://127.0.0.1:{places['port']}"
        self.process = Process(self.name, self.url, contender.argv(places), {}, log)
        with suppress(ProcessLookupError):  # the process has ended; `wait_until_ready` reports it
            os.sched_setaffinity(self.process.pid, cores)

    def cpu_s(self) -> float:
        """Return the CPU time of the process and its children so far, in seconds."""
        return sum(map(_cpu_s, self._tree()))

    def resident_bytes(self) -> int:
        """Return the sum of the peak memory of the running processes, in bytes."""
        return sum(map(_peak_bytes, self._tree()))

    def _tree(self) -> list[psutil.Process]:
        # Children first: the time of a child that ends meanwhile is then counted in its parent's.
        root = psutil.Process(self.process.pid)
        return [*reversed(root.children(recursive=True)), root]


def _cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        return sum(process.cpu_times()[:4])  # its own time, and that of children it has waited for
    return 0.0


def _peak_bytes(process: psutil.Process) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
