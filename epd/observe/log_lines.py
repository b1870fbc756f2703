"""Log lines on their way to a stream: lines of requests in batches, all others at once."""

import asyncio
import atexit
import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO

BATCH_S = 0.05
"""How long a line of a request may wait for others."""

BATCH_BYTES = 64 * 1024
"""How much may wait."""

WHOLE_BYTES = select.PIPE_BUF
"""A pipe takes so much as one piece; several workers share one, and none may cut another's line."""


class LineWriter:
    """Writes lines to a stream, in the order in which they come. Safe for threads.

    One write for each request is a tenth of what a request costs. So the lines of requests wait for
    each other for a moment. Any other line is written at once, behind those that wait, and so is
    what waits when the process exits. A process that is killed loses the last 50 ms.
    """

    def __init__(self, stream: BinaryIO) -> None:
        """Write to a stream that is not closed before the process exits."""
        self._stream = stream
        # Reentrant: a garbage collection while it is held may log what it finds, on this thread.
        self._lock = threading.RLock()
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._flushing: tuple[asyncio.AbstractEventLoop, asyncio.TimerHandle] | None = None
        atexit.register(self.flush)

    def write(self, line: str | bytes) -> None:
        """Write a line, and all lines that wait."""
        with self._lock:
            self._waiting.append(_ended(line))
        self.flush()

    def write_soon(self, line: str | bytes) -> None:
        """Write a line within `BATCH_S`. For the event loop's thread."""
        line = _ended(line)
        with self._lock:
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            full = self._waiting_bytes >= BATCH_BYTES
        loop = asyncio.get_running_loop()
        if full:
            self.flush()
        elif self._flushing is None or self._flushing[0] is not loop:
            self._flushing = loop, loop.call_later(BATCH_S, self._flush_batch)

    def flush(self) -> None:
        """Write all lines that wait. If the reader has closed the stream, the lines are lost."""
        with self._lock:
            lines, self._waiting, self._waiting_bytes = self._waiting, [], 0
            with suppress(OSError):
                for part in _parts(lines):
                    self._write(part)

    def _write(self, part: bytes) -> None:
        left = memoryview(part)
        while left:  # an unbuffered stream may take less
            written = self._stream.write(left)
            if not written:  # and one that does not block may take nothing
                return
            left = left[written:]
            self._stream.flush()

    def _flush_batch(self) -> None:
        self._flushing = None
        self.flush()


class LineLogger:
    """What structlog hands rendered lines to."""

    def __init__(self, lines: LineWriter) -> None:
        """Write to these lines."""
        self._lines = lines

    def msg(self, message: str | bytes) -> None:
        """Write a line at once."""
        self._lines.write(message)

    debug = info = warning = error = critical = exception = fatal = log = msg


def _parts(lines: Sequence[bytes]) -> Iterator[bytes]:
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
