"""Find processes by what child processes inherit: a variable, or the standard output."""

import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path


def new_mark() -> str:
    """Return a new name for an environment variable."""
    return f"TEST_MARK_{uuid.uuid4().hex}"


def marked(mark: str) -> dict[str, str]:
    """Return this environment with the mark and without `PYTHONUNBUFFERED`.

    That variable would hide output that a program has not flushed.
    """
    return {mark: "1"} | {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}


def processes_of(mark: str) -> Mapping[int, str]:
    """Return the command lines, by process id, of the living processes with this mark."""
    found = {}
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes():
                command = (environ.parent / "cmdline").read_text().replace("\0", " ")
                found[int(environ.parent.name)] = command
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def processes_with_output(path: Path) -> set[int]:
    """Return the ids of the living processes that write their output to a file, or into a folder.

    A forked process shows the environment of its parent, but has its own output.
    """
    found = set()
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if output.readlink().is_relative_to(path):
                found.add(int(output.parts[2]))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def left(mark: str, within_s: float = 120, most: int = 0) -> Mapping[int, str]:
    """Wait until at most `most` processes are left, or time out; return those left."""
    deadline_s = time.monotonic() + within_s
    while len(found := processes_of(mark)) > most and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return found
