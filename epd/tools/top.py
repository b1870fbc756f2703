"""Command `epd top`: read a proxy's state at an interval, and draw it."""

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any, cast
from urllib.error import URLError
from urllib.request import HTTPErrorProcessor, ProxyHandler, Request, build_opener

from rich.console import Console
from rich.live import Live

from epd.json_or_none import json_or_none
from epd.parser import Commands, admin_key, http_url
from epd.tools.top_screen import frame
from epd.ui.state import UiState

TIMEOUT_S = 5.0
INTERVAL_S = 1.0
"""Interval of updates, in seconds: the state changes no faster than twice a second."""


class NoState(Exception):
    """Error of a proxy with unreadable state. The message is for the operator."""


class KeyRejected(NoState):
    """Error of a rejected key. A retry would fail too."""


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
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="URL of the proxy (default: %(default)s)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one frame of any length and exit, as without a terminal",
    )
    parser.set_defaults(run=_run)


def _run(url: str, *, once: bool) -> None:
    key, console = admin_key(), Console()
    try:
        # In a file or a pipe, a frame cannot replace the previous one.
        if console.is_terminal and not once:
            _watch(console, url, key)
        else:
            console.print(frame(_ask(url, key), console.width, None))
    except NoState as error:
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
            except NoState as error:
                failure = str(error)
            live.update(frame(state, console.width, console.height, failure), refresh=True)
            while select.select(keyboard, [], [], INTERVAL_S)[0]:
                typed = os.read(keyboard[0], 64)
                if not typed or b"q" in typed.lower():
                    return


def _ask(url: str, key: str | None) -> UiState:
    """Return the proxy's state.

    Raises:
        KeyRejected: the proxy rejects the key.
        NoState: the proxy does not answer, or has another version.
    """
    request = Request(f"{url}/ui/state", headers={} if key is None else {"X-API-Key": key})  # noqa: S310 - http
    try:
        with build_opener(ProxyHandler({}), _Answer).open(request, timeout=TIMEOUT_S) as answer:
            status, document = answer.status, json_or_none(answer.read())
    except (OSError, HTTPException) as error:  # TimeoutError is an OSError
        reason = error.reason if isinstance(error, URLError) else error
        raise NoState(f"{url} does not answer: {str(reason) or type(reason).__name__}") from None
    if status in {401, 403}:
        match document:
            case {"error": {"message": str() as reason}} | {"error": str() as reason}:
                pass
            case _:
                reason = str(status)
        raise KeyRejected(f"{url} rejects the request: {reason} (set EPD_ADMIN_API_KEY)")
    if not isinstance(document, dict) or not document.keys() >= UiState.__required_keys__:
        raise NoState(f"{url} answered {status}: it is not an EPD proxy of this version")
    return cast("UiState", document)


class _Answer(HTTPErrorProcessor):
    """Answers of every status: a redirect would send the key elsewhere."""

    def http_response(self, request: Request, response: Any) -> Any:  # noqa: ARG002 - urllib's
        return response

    https_response = http_response


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
