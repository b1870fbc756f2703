"""Processes by a mark in their environment, which their children inherit."""

import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path


def new_mark() -> str:
    """Return a name for an environment variable that no other program sets."""
    return f"TEST_MARK_{uuid.uuid4().hex}"


def marked(mark: str) -> dict[str, str]:
    """Return this environment with a mark, and without `PYTHONUNBUFFERED`.

    The variable would hide that a program holds back its output.
    """
    return {mark: "1"} | {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}


def processes_of(mark: str) -> Mapping[int, str]:
    """Command lines of the living processes that were started with this mark, by their ids."""
    found = {}
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes():
                command = (environ.parent / "cmdline").read_text().replace("\0", " ")
                found[int(environ.parent.name)] = command
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def left(mark: str, within_s: float = 120, most: int = 0) -> Mapping[int, str]:
    """Those that are left when they are no more than `most`, or after some seconds."""
    deadline_s = time.monotonic() + within_s
    while len(found := processes_of(mark)) > most and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return found
