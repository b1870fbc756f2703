"""`epd serve` as a process with a given number of file descriptors."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

INSTANCES = ["--encode-servers-urls", "http://e:1", "--decode-servers-urls", "http://d:1"]


@contextmanager
def serving(*args: str, descriptors: int = 1024) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `epd serve` on a free port with JSON logs; yield its URL and its process.

    Args:
        args: flags.
        descriptors: hard limit of descriptors; the soft limit is 40.
    """
    limits = f'ulimit -Sn 40; ulimit -Hn {descriptors}; exec "$@"'
    process = subprocess.Popen(
        [
            *("sh", "-c", limits, "sh", sys.executable, "-m", "epd", "serve"),
            *("--host", "127.0.0.1", "--port", "0", "--log-format", "json", *args),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process:
        try:
            yield json.loads(process.stderr.readline())["url"], process
        finally:
            process.kill()
