"""Proxies that are measured: a command line each, run as a process beside the others."""

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
    """A proxy's name and command line.

    Attributes:
        name: what results call it.
        command: its words, with places such as `{port}` in them.
    """

    name: str
    command: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `name=command line`.

        Raises:
            ValueError: it is no such text, its name is none for a file, or it has another place
                than those there are.
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
                raise ValueError(f"{word!r} has a place that is none of {known}") from None
        return cls(name, words)

    def argv(self, places: Mapping[str, str]) -> list[str]:
        """Its command line, with its places filled."""
        return [word.format(**places) for word in self.command]


class Measured:
    """A contender that runs, on the cores that it was given."""

    def __init__(
        self, contender: Contender, places: Mapping[str, str], log: Path, cores: set[int]
    ) -> None:
        """Start it."""
        self.name = contender.name
        self.url = f"http://127.0.0.1:{places['port']}"
        self.process = Process(self.name, self.url, contender.argv(places), {}, log)
        with suppress(ProcessLookupError):  # it has ended, as whoever waits for it finds out
            os.sched_setaffinity(self.process.pid, cores)

    def cpu_s(self) -> float:
        """What it and its children have used so far, those that have ended too."""
        return sum(map(_cpu_s, self._tree()))

    def resident_bytes(self) -> int:
        """The most that each of them has had in memory, added up; those that run."""
        return sum(map(_peak_bytes, self._tree()))

    def _tree(self) -> list[psutil.Process]:
        # Children first: what one has used that ends meanwhile is then among what its parent has.
        root = psutil.Process(self.process.pid)
        return [*reversed(root.children(recursive=True)), root]


def _cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        return sum(process.cpu_times()[:4])  # its own, and of children that it has waited for
    return 0.0


def _peak_bytes(process: psutil.Process) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
