"""Buffered writing of log lines: request lines go out in batches, other lines at once."""

import asyncio
import atexit
import select
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import BinaryIO

BATCH_S = 0.05
"""Upper bound of the time that a request's line waits in a batch, in seconds."""

BATCH_LINES = 256
"""Upper bound of the lines of a batch. A request's line has about 250 bytes."""

WHOLE_BYTES = select.PIPE_BUF
"""Size of the largest write that a pipe takes as one piece, in bytes. Several workers share a pipe,
and their lines must not be mixed."""

Rendering = Callable[[], str | bytes]
"""Returns a line, without its end."""


class LineWriter:
    """Writer of lines to a stream, in the order in which they arrive. Safe for threads.

    A write for each request is a tenth of what a request costs. Therefore the lines of requests
    wait up to `BATCH_S`, and are rendered and written together: rendered one after the other they
    take half the time. Any other line is written at once, after the waiting ones. Waiting lines are
    also written when the process exits. A process that is killed loses the last 50 ms.
    """

    def __init__(self, stream: BinaryIO) -> None:
        """Write to a stream that stays open until the process exits."""
        self._stream = stream
        # Reentrant: a garbage collection that runs under the lock may log on this thread.
        self._lock = threading.RLock()
        self._waiting: list[Rendering] = []
        self._flushing: tuple[asyncio.AbstractEventLoop, asyncio.TimerHandle] | None = None
        atexit.register(self.flush)

    def write(self, line: str | bytes) -> None:
        """Write the waiting lines, then this line."""
        with self._lock:
            self._waiting.append(lambda: line)
        self.flush()

    def write_soon(self, line: Rendering) -> None:
        """Render and write a line within `BATCH_S`. Call it on the event loop's thread."""
        with self._lock:
            self._waiting.append(line)
            full = len(self._waiting) >= BATCH_LINES
        loop = asyncio.get_running_loop()
        if full:
            self.flush()
        elif self._flushing is None or self._flushing[0] is not loop:
            self._flushing = loop, loop.call_later(BATCH_S, self._flush_batch)

    def flush(self) -> None:
        """Write the waiting lines. They are lost if the reader has closed the stream."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            with suppress(OSError):
                for part in _parts(_ended(render()) for render in waiting):
                    self._write(part)

    def _write(self, part: bytes) -> None:
        left = memoryview(part)
        while left:  # an unbuffered stream may take less
            written = self._stream.write(left)
            if not written:  # a nonblocking stream may take nothing
                return
            left = left[written:]
            self._stream.flush()

    def _flush_batch(self) -> None:
        self._flushing = None
        self.flush()


class LineLogger:
    """Logger to which structlog passes rendered lines."""

    def __init__(self, lines: LineWriter) -> None:
        self._lines = lines

    def msg(self, message: str | bytes) -> None:
        self._lines.write(message)

    debug = info = warning = error = critical = exception = fatal = log = msg


def _parts(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Join lines to parts that a pipe takes as one piece; a longer line is a part by itself."""
    part, size = list[bytes](), 0
    for line in lines:
        if part and size + len(line) > WHOLE_BYTES:
            yield b"".join(part)
            part, size = [], 0
        part.append(line)
        size += len(line)
    if part:
        yield b"".join(part)


def _ended(line: str | bytes) -> bytes:
    return (line.encode(errors="backslashreplace") if isinstance(line, str) else line) + b"\n"
