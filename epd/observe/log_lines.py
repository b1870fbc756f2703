"""Writing of log lines on a thread: request lines in batches, other lines without delay."""

import asyncio
import atexit
import select
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import BinaryIO

import structlog

BATCH_S = 0.05
"""Upper bound of the time that a request's line waits in a batch, in seconds."""

BATCH_LINES = 256
"""Upper bound of the lines of a batch. A request's line has about 250 bytes."""

WHOLE_BYTES = select.PIPE_BUF
"""Size of the largest write that a pipe takes as one piece, in bytes. Several workers share a pipe,
and their lines must not be mixed."""

MAX_LINES = 10_000
"""Upper bound of the lines that wait for the stream. Further lines are dropped and counted."""

EXIT_S = 1.0
"""Upper bound of the wait for the stream when the process exits, in seconds."""

Rendering = Callable[[], str | bytes]
"""Returns a line, without its end."""


class LineWriter:
    """Writer of lines to a stream, in the order in which they arrive. Safe for threads.

    A thread of its own writes: a stream that its reader leaves full, such as a pipe, delays no
    request. A write for each request is a tenth of what a request costs. Therefore the lines of
    requests wait up to `BATCH_S`, and are rendered and written together: rendered one after the
    other they take half the time. Any other line goes to the thread at once, after the waiting
    ones. Waiting lines are also written when the process exits. A process that is killed loses the
    last 50 ms.

    Attributes:
        dropped: number of lines that the stream did not take.
    """

    def __init__(self, stream: BinaryIO) -> None:
        """Write to a stream that stays open until the process exits.

        The stream is unbuffered: Python aborts at its exit if a thread holds the lock of a buffer.
        """
        self._stream = stream
        # Reentrant, as the queue is: a garbage collection under the lock may log on this thread.
        self._lock = threading.RLock()
        self._waiting: list[Rendering] = []
        self._batches = SimpleQueue[list[Rendering] | threading.Event]()
        self._accepted = self._written = self.dropped = self._reported = 0
        self._thread: threading.Thread | None = None
        self._flushing: tuple[asyncio.AbstractEventLoop, asyncio.TimerHandle] | None = None
        atexit.register(self.flush)

    def write(self, line: str | bytes) -> None:
        """Pass the waiting lines, then this line, to the thread."""
        self._add(lambda: line)
        self._pass_batch()

    def write_soon(self, line: Rendering) -> None:
        """Render and write a line within `BATCH_S`. Call it on the event loop's thread."""
        self._add(line)
        loop = asyncio.get_running_loop()
        if len(self._waiting) >= BATCH_LINES:
            self._pass_batch()
        elif self._flushing is None or self._flushing[0] is not loop:
            self._flushing = loop, loop.call_later(BATCH_S, self._pass_in_time)

    def flush(self) -> None:
        """Write the waiting lines, and wait for that up to `EXIT_S`."""
        self._pass_batch()
        written = threading.Event()
        self._batches.put(written)
        written.wait(EXIT_S)

    def _add(self, line: Rendering) -> None:
        with self._lock:
            if self._accepted - self._written >= MAX_LINES:
                self.dropped += 1
            else:
                self._accepted += 1
                self._waiting.append(line)

    def _pass_batch(self) -> None:
        with self._lock:
            if self._waiting:
                self._batches.put(self._waiting)
                self._waiting = []
            if self._thread is None or not self._thread.is_alive():  # as after a fork
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                with suppress(RuntimeError):  # no thread can be started: the next line tries again
                    self._thread.start()

    def _pass_in_time(self) -> None:
        self._flushing = None
        self._pass_batch()

    def _run(self) -> None:
        while True:
            batch = self._batches.get()
            if isinstance(batch, threading.Event):
                batch.set()
                continue
            # The lines are lost if the reader has closed the stream.
            with suppress(OSError):
                for part in _parts(map(_rendered, batch)):
                    self._write(part)
            self._written += len(batch)
            if self.dropped > self._reported:
                count, self._reported = self.dropped - self._reported, self.dropped
                log = structlog.get_logger("epd")
                log.warning("log lines dropped: the log stream was not read in time", count=count)

    def _write(self, part: bytes) -> None:
        left = memoryview(part)
        while left:  # an unbuffered stream may take less
            written = self._stream.write(left)
            if written is None:  # a nonblocking stream is full
                select.select((), (self._stream,), ())
            else:
                left = left[written:]


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


def _rendered(render: Rendering) -> bytes:
    try:
        line = render()
    except Exception as error:  # noqa: BLE001 - a defect in one line must not end the log
        line = f"a log line could not be rendered: {type(error).__name__}"
    return (line.encode(errors="backslashreplace") if isinstance(line, str) else line) + b"\n"
