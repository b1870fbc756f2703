"""Ends process groups where the process that started them was killed and could not.

A program of its own, started by its path: it needs nothing but Python. Each line of its input is
`+<group>` for one to watch, `-<group>` for one that has ended, or `/<path>`, a folder that is
deleted once they have. The end of the input is the end of whoever wrote it.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress

TERM_S = 10.0
POLL_S = 0.1


def main() -> None:
    """Read until the writer is gone, then end the groups that are left, and delete the folders."""
    groups, folders = set[int](), list[str]()
    for line in sys.stdin:
        if line.startswith("/"):
            folders.append(line.rstrip("\n"))
            continue
        group = int(line)
        (groups.add if group > 0 else groups.discard)(abs(group))
    for group in groups:
        told(group, signal.SIGTERM)
    deadline_s = time.monotonic() + TERM_S
    while time.monotonic() < deadline_s and any(told(group, 0) for group in groups):
        time.sleep(POLL_S)
    for group in groups:
        told(group, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def told(group: int, number: int) -> bool:
    """Whether there was a group to send the signal to."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    main()
