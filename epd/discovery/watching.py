"""What all watched sources of instances share: their polls, and the last answer of each."""

import asyncio
from contextlib import suppress
from typing import Protocol

from epd.shared_page import PageUnreadable, SharedPage


class Watch(Protocol):
    """A source that is polled."""

    interval_s: float

    async def look(self) -> None:
        """Take over what the source has now; keep what is known if it is unavailable."""


async def follow(source: Watch, begun: asyncio.Event) -> None:
    """Look at a source periodically. Set `begun` after the first look."""
    while True:
        await source.look()
        begun.set()
        await asyncio.sleep(source.interval_s)


def write_last_answer(page: SharedPage | None, answer: bytes) -> None:
    """Write a source's last answer to a page, unless another worker is doing that at the moment."""
    if page is not None:
        with suppress(OSError), page.hold_lock():
            page.write(answer)


def last_answer(page: SharedPage | None) -> bytes:
    """Return the last answer on a page; empty without one."""
    if page is not None:
        with suppress(OSError, PageUnreadable):
            return page.read() or b""
    return b""
