"""Command `epd top`: read a proxy's state at an interval, and draw it."""

import asyncio
import os
import sys
import termios
import tty
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import cast

import aiohttp
from rich.console import Console
from rich.live import Live

from epd.json_or_none import json_or_none
from epd.parser import Commands, admin_key, http_url
from epd.tools.top_screen import frame
from epd.ui.state import UiState

TIMEOUT_S = 5.0


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
        "--interval",
        type=_interval,
        default=1.0,
        metavar="SECONDS",
        help="seconds between updates (default: 1)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one frame of any length and exit, as without a terminal",
    )
    parser.set_defaults(run=_run)


def _interval(text: str) -> float:
    with suppress(ValueError):
        if (seconds := float(text)) >= 0.1:  # noqa: PLR2004 - the state changes no faster
            return seconds
    raise ArgumentTypeError(f"{text!r} is not a number of seconds of at least 0.1")


def _run(url: str, interval: float, *, once: bool) -> None:
    key, console = admin_key(), Console()
    # In a file or a pipe, a frame cannot replace the previous one.
    watching = (
        _watch(console, url, key, interval)
        if console.is_terminal and not once
        else _once(console, url, key)
    )
    try:
        asyncio.run(watching)
    except NoState as error:
        sys.exit(f"epd top: {error}")
    except KeyboardInterrupt:
        return


async def _once(console: Console, url: str, key: str | None) -> None:
    async with _session(key) as http:
        state = await _ask(http, url)
    console.print(frame(state, console.width, None))


async def _watch(console: Console, url: str, key: str | None, interval_s: float) -> None:
    ended = asyncio.Event()
    state: UiState | None = None
    async with _session(key) as http:
        with _quit_key(ended), Live(console=console, screen=True, auto_refresh=False) as live:
            while not ended.is_set():
                failure = ""
                try:
                    state = await _ask(http, url)
                except KeyRejected:
                    raise
                except NoState as error:
                    failure = str(error)
                live.update(frame(state, console.width, console.height, failure), refresh=True)
                with suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await ended.wait()


def _session(key: str | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers={} if key is None else {"X-API-Key": key},
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
    )


async def _ask(http: aiohttp.ClientSession, url: str) -> UiState:
    """Return the proxy's state.

    Raises:
        KeyRejected: the proxy rejects the key.
        NoState: the proxy does not answer, or has another version.
    """
    try:
        async with http.get(f"{url}/ui/state", allow_redirects=False) as answer:
            body = await answer.read()
    except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
        raise NoState(f"{url} does not answer: {str(error) or type(error).__name__}") from None
    document = json_or_none(body)
    if answer.status in {401, 403}:
        match document:
            case {"error": {"message": str() as reason}} | {"error": str() as reason}:
                pass
            case _:
                reason = str(answer.status)
        raise KeyRejected(f"{url} rejects the request: {reason} (set EPD_ADMIN_API_KEY)")
    if not isinstance(document, dict) or not document.keys() >= UiState.__required_keys__:
        raise NoState(f"{url} answered {answer.status}: it is not an EPD proxy of this version")
    return cast("UiState", document)


@contextmanager
def _quit_key(ended: asyncio.Event) -> Iterator[None]:
    """Set the event when q is pressed, if standard input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    loop = asyncio.get_running_loop()

    def quit_pressed() -> None:
        typed = os.read(keyboard, 64)
        if not typed or b"q" in typed.lower():
            ended.set()
            loop.remove_reader(keyboard)

    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, quit_pressed)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
