"""Further proxies in front of the engines of a stack."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from epd.routing.instances import ANSWERING, Role
from epd.tools.up.engine import Engine
from tests.e2e.served import Served


@contextmanager
def another_proxy(
    stack: Served, *flags: str, encode: bool = True, servers: Sequence[Engine] = ()
) -> Iterator[str]:
    """Start another proxy in front of the same engines and store; yield its URL.

    Args:
        stack: stack with the engines.
        flags: additional flags.
        encode: whether the proxy has an encode stage and the store.
        servers: the only instances, of `--servers-urls`; empty for the engines in their roles.
    """

    def urls(*roles: Role) -> str:
        return ",".join(engine.url for engine in stack.stack.all_engines if engine.role in roles)

    store = ["--ec-store", stack.stack.store, "--ec-store-budget-s", "2"]
    roles = [
        *("--encode-servers-urls", urls(Role.ENCODE) if encode else "disable"),
        *("--prefill-servers-urls", urls(Role.PREFILL)),
        *("--decode-servers-urls", urls(*ANSWERING)),
    ]
    if servers:
        roles = ["--servers-urls", ",".join(server.url for server in servers)]
    with started_proxy(*roles, *(store if encode else []), *flags) as url:
        yield url


@contextmanager
def started_proxy(*flags: str) -> Iterator[str]:
    """Start a proxy on a free port; yield its URL."""
    command = [
        *(sys.executable, "-m", "epd", "serve", "--host", "127.0.0.1", "--port", "0"),
        *("--log-format", "json", "--drain-delay-s", "0"),
        *flags,
    ]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process,
        ThreadPoolExecutor(1) as reading,
    ):
        assert process.stderr is not None
        try:
            url = json.loads(process.stderr.readline())["url"]
            # The proxy would wait for a reader once the pipe is full.
            reading.submit(process.stderr.read)
            yield url
        finally:
            process.terminate()
