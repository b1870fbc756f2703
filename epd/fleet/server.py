"""A server that is to be started."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is to be started.

    Attributes:
        name: what messages and its log file call it.
        url: base URL; `/health` under it answers 200 once it serves.
        command: its command line.
        environment: what it needs beside the caller's.
    """

    name: str
    url: str
    command: tuple[str, ...]
    environment: Mapping[str, str]

    def shell(self) -> str:
        """What starts it from a POSIX shell, a line for each flag."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words += map(shlex.quote, self.command)
        return "".join(
            f" \\\n    {word}" if word.startswith("--") else f" {word}" for word in words
        ).lstrip()
