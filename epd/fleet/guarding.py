"""The guard of a fleet, seen from the process that starts it."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from epd.fleet import announce, guard


class Guard:
    """Ends what this process started, should it be killed and have no chance to.

    It is a process of its own (`guard.py`) that waits for the end of a pipe. Linux could end
    children with their parent (PR_SET_PDEATHSIG), but not the engines' own children with them.
    """

    def __init__(self) -> None:
        """Start it."""
        self._popen = subprocess.Popen(
            [sys.executable, "-I", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def start(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Start a process that leads a group, which the guard knows of before the command runs.

        Args:
            command: its command line.
            options: for `subprocess.Popen`.
        """
        pipe = cast("IO[str]", self._popen.stdin).fileno()
        announced = (sys.executable, "-I", announce.__file__, str(pipe), *command)
        return subprocess.Popen(announced, pass_fds=[pipe], start_new_session=True, **options)

    def watch(self, group: int) -> None:
        """End this process group too."""
        self._say(f"+{group}\n")

    def forget(self, group: int) -> None:
        """It has ended."""
        self._say(f"-{group}\n")

    def delete(self, folder: Path) -> None:
        """Delete a folder too, an absolute path, once they have ended."""
        self._say(f"{folder}\n")

    def close(self) -> None:
        """All groups have ended: the guard ends without doing anything."""
        self._popen.kill()
        self._popen.communicate()

    def _say(self, line: str) -> None:
        # Whoever killed the guard wants none.
        with suppress(BrokenPipeError):
            print(line, end="", file=self._popen.stdin, flush=True)
