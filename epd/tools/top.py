"""Command `epd top`: read a proxy's state at an interval, and draw it."""

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from rich.console import Console
from rich.live import Live

from epd.parser import Commands, admin_key, http_url
from epd.running_proxy import KeyRejected, NoAnswer, ask_proxy, find_proxy
from epd.tools.top_screen import frame
from epd.ui.state import UiState

INTERVAL_S = 1.0
"""Interval of updates, in seconds: the state changes no faster than twice a second."""


def add_parser(commands: Commands) -> None:
    """Add `top` to the commands of `epd`."""
    parser = commands.add_parser(
        "top",
        help="watch a proxy: instances, latencies, saved work, latest requests",
        description="Show the content of a proxy's page /ui in a terminal. Press q to quit. "
        "EPD_ADMIN_API_KEY or ADMIN_API_KEY is the proxy's admin key; a proxy without one answers "
        "only if its --host is a loopback address.",
        epilog="example: epd top --url http://localhost:8000",
    )
    parser.add_argument(
        "--url",
        type=http_url,
        metavar="URL",
        help="URL of the proxy (default: that of the fleet of `epd up` on this host, otherwise "
        "http://127.0.0.1:8000)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one frame of any length and exit, as without a terminal",
    )
    parser.set_defaults(run=_run)


def _run(url: str | None, *, once: bool) -> None:
    key, console = admin_key(), Console()
    try:
        url = url or find_proxy()
        # In a file or a pipe, a frame cannot replace the previous one.
        if console.is_terminal and not once:
            _watch(console, url, key)
        else:
            console.print(frame(_ask(url, key), console.width, None))
    except NoAnswer as error:
        sys.exit(f"epd top: {error}")
    except KeyboardInterrupt:
        return


def _watch(console: Console, url: str, key: str | None) -> None:
    state: UiState | None = None
    with _keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            failure = ""
            try:
                state = _ask(url, key)
            except KeyRejected:
                raise
            except NoAnswer as error:
                failure = str(error)
            live.update(frame(state, console.width, console.height, failure), refresh=True)
            while select.select(keyboard, [], [], INTERVAL_S)[0]:
                typed = os.read(keyboard[0], 64)
                if not typed or b"q" in typed.lower():
                    return


def _ask(url: str, key: str | None) -> UiState:
    return cast("UiState", ask_proxy(url, "/ui/state", key, UiState.__required_keys__))


@contextmanager
def _keyboard() -> Iterator[list[int]]:
    """Read single keys from standard input, if that is a terminal; yield its descriptor."""
    if not sys.stdin.isatty():
        yield []
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield [keyboard]
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
