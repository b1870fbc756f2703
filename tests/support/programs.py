"""`epd` as a program: flags, address, exit."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any
from unittest.mock import patch

from epd.__main__ import main
from tests.support.forked_epd import fork_epd

EPD = [sys.executable, "-m", "epd"]

ADDRESS = ["--host", "127.0.0.1", "--port", "0"]

INSTANCES = ["--encode-servers-urls", "http://e:1", "--decode-servers-urls", "http://d:1"]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*EPD, *args], capture_output=True, text=True, timeout=120, check=False)


def called(
    *args: str, stdin: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Call the program in this process: for a command that ends before it starts anything.

    It does what `run` does without the second that a process takes to import the program.
    """
    out, err = StringIO(), StringIO()
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch("sys.stdin", StringIO(stdin)),
        patch.dict(os.environ, env or {}),
    ):
        try:
            main(args)
            code = 0
        except SystemExit as end:
            # As the interpreter does at its end: a message goes to stderr.
            code = end.code if isinstance(end.code, int) else 1
            if isinstance(end.code, str):
                print(end.code, file=err)
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


@contextmanager
def serving(
    *args: str,
    env: dict[str, str] | None = None,
    lines: list[dict[str, Any]] | None = None,
    executed: bool = False,
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `epd serve` on a free port with JSON logs; yield its URL and its process.

    Args:
        args: flags.
        env: variables in addition to those of this process.
        lines: receives the log lines up to the one that says the proxy listens.
        executed: whether the program must be executed, not forked: libraries read some variables
            at import.
    """
    lines = [] if lines is None else lines
    words = ["serve", *ADDRESS, "--log-format", "json", "--drain-delay-s", "0", *args]
    environment = os.environ | (env or {})
    if executed:
        process = subprocess.Popen(
            [*EPD, *words], stderr=subprocess.PIPE, text=True, env=environment
        )
    else:
        process = fork_epd(*words, environment=environment)
    assert process.stderr is not None
    with process:
        try:
            for line in process.stderr:
                lines.append(json.loads(line))
                if lines[-1]["event"] == "listening":
                    break
            yield lines[-1]["url"], process
        finally:
            process.kill()


def refuses_connections(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) != 0
