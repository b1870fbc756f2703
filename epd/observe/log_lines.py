"""Writing of log lines on a thread, in batches."""

import atexit
import select
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import BinaryIO

import structlog

BATCH_S = 0.05
"""Upper bound of the time that a line waits for others, in seconds."""

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
    request. A write for each request is a tenth of what a request costs. Therefore lines of
    requests wait up to `BATCH_S`, and are rendered and written together: rendered one after the
    other they take half the time. Waiting lines are also written when the process exits. A process
    that is killed loses those of the last 50 ms.

    Attributes:
        dropped: number of lines that the stream did not take.
    """

    def __init__(self, stream: BinaryIO, batch_s: float = BATCH_S) -> None:
        """Write to a stream that stays open until the process exits.

        The stream is unbuffered: Python aborts at its exit if a thread holds the lock of a buffer.
        """
        self._stream = stream
        self._batch_s = batch_s
        # Reentrant: a garbage collection may log on this thread.
        self._lines = SimpleQueue[Rendering | threading.Event]()
        self._hurry = threading.Event()
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None
        self.dropped = self._reported = 0
        atexit.register(self.flush)

    def write(self, line: Rendering, *, at_once: bool = False) -> None:
        if self._lines.qsize() >= MAX_LINES:
            self.dropped += 1
            return
        self._put(line)
        if at_once:
            self._hurry.set()

    def flush(self) -> None:
        """Write the waiting lines, and wait for that up to `EXIT_S`."""
        written = threading.Event()
        self._put(written)
        self._hurry.set()
        written.wait(EXIT_S)

    def _put(self, line: Rendering | threading.Event) -> None:
        self._lines.put(line)
        if self._thread is None or not self._thread.is_alive():  # as after a fork
            self._start_thread()

    def _start_thread(self) -> None:
        with self._starting, suppress(RuntimeError):  # without a thread, the next line tries again
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name="log", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            batch = [self._lines.get()]
            self._hurry.wait(self._batch_s)
            self._hurry.clear()
            with suppress(Empty):
                while len(batch) < MAX_LINES:
                    batch.append(self._lines.get_nowait())
            # The lines are lost if the reader has closed the stream.
            with suppress(OSError):
                for part in _parts(_rendered(line) for line in batch if callable(line)):
                    self._write(part)
            for line in batch:
                if isinstance(line, threading.Event):
                    line.set()
            if self.dropped > self._reported:
                count, self._reported = self.dropped - self._reported, self.dropped
                log = structlog.get_logger("epd")
                log.warning("log lines dropped: the log stream was not read in time", count=count)

    def _write(self, part: bytes) -> None:
        rest = memoryview(part)
        while rest:  # an unbuffered stream may take less
            written = self._stream.write(rest)
            if written is None:  # a nonblocking stream is full
                select.select((), (self._stream,), ())
            else:
                rest = rest[written:]


class LineLogger:
    """Logger to which structlog passes rendered lines."""

    def __init__(self, lines: LineWriter) -> None:
        self._lines = lines

    def msg(self, message: str | bytes) -> None:
        # The last line before a fatal signal is the one that matters.
        self._lines.write(lambda: message, at_once=True)

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
