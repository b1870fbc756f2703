"""Log lines: in order, one write for many requests, and important ones without delay.

Tests of the time of a write block the event loop, so that only the thread can write.
"""

import asyncio
import io
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import orjson
import pytest
import structlog

from epd.observe.log_lines import (
    BATCH_LINES,
    BATCH_S,
    EXIT_S,
    MAX_LINES,
    WHOLE_BYTES,
    LineLogger,
    LineWriter,
)

REQUESTS = """
import asyncio, logging, re, structlog, sys
from epd.config import ProxyConfig
from epd.observe import logs
from epd.events import RequestRecord, StageDone
logs.configure({log_format!r}, "info", worker={worker})
urls = {{"encode_servers_urls": ("http://e:1",), "decode_servers_urls": ("http://d:1",)}}
observer = logs.LogObserver(ProxyConfig(**urls))
stages = (StageDone("decode", "http://d:1", 1.0, 0.01234, None),)
done = RequestRecord(
    request_id="a b", engine_id="e", method="POST", path="/v1/chat/completions", status=200,
    seconds=0.1, error=None, reason=None, stages=stages, items={{"hit": 2}}, retries=1, policy="é",
    model_name="a model", stream=True, first_token_s=0.05, answer_bytes=77,
)
"""
TWICE = """
async def main():
    observer.request_done(done)
    observer.__dict__["_lines"] = None
    observer.request_done(done)
asyncio.run(main())
"""
EXIT = """
async def main():
    observer.request_done(done)
    sys.exit(3)
asyncio.run(main())
"""


class Written(io.BytesIO):
    """Stream that records writes.

    Attributes:
        most: maximum number of bytes per write.
        meanwhile: called once, during a write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes] = []
        self.most: int | None = None
        self.meanwhile: Callable[[], None] | None = None

    def write(self, data: bytes) -> int:  # type: ignore[override]
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        self.parts.append(bytes(data[: self.most]))
        return super().write(self.parts[-1])


@pytest.fixture
def stream() -> Written:
    return Written()


async def test_lines_of_requests_are_one_write(stream: Written) -> None:
    lines = LineWriter(stream)
    for number in range(100):
        lines.write_soon(partial(str, number))
    assert stream.parts == []
    await asyncio.sleep(3 * BATCH_S)

    assert len(stream.parts) == 1
    assert stream.getvalue().split() == [b"%d" % number for number in range(100)]
    lines.write_soon(lambda: "later")
    await asyncio.sleep(3 * BATCH_S)
    assert stream.getvalue().endswith(b"99\nlater\n")


async def test_any_other_line_is_written_at_once_behind_those_that_wait(stream: Written) -> None:
    lines = LineWriter(stream)
    lines.write_soon(lambda: "request")
    LineLogger(lines).warning("warning")

    assert wait_for_bytes(stream) == b"request\nwarning\n"
    assert len(stream.parts) == 1


@pytest.mark.parametrize(("left", "written"), [(1, False), (0, True)])
async def test_at_most_one_batch_of_lines_waits(stream: Written, left: int, written: bool) -> None:
    lines = LineWriter(stream)
    for _ in range(BATCH_LINES - left):
        lines.write_soon(lambda: "request")

    assert bool(wait_for_bytes(stream, 10 if written else 3 * BATCH_S)) is written


async def test_a_batch_is_written_in_parts_that_a_pipe_takes_as_one_piece(stream: Written) -> None:
    """Several workers share a pipe; a longer write may be interleaved with another's."""
    lines = LineWriter(stream)
    for number in range(100):
        lines.write_soon(partial("{} {}".format, number, "x" * 300))
    lines.write_soon(lambda: "y" * 2 * WHOLE_BYTES)
    lines.flush()

    assert b"".join(stream.parts) == stream.getvalue()
    assert all(part.endswith(b"\n") for part in stream.parts)
    *parts, last, longer = map(len, stream.parts)
    assert max(*parts, last) <= WHOLE_BYTES < min(parts) + 303
    assert longer == 2 * WHOLE_BYTES + 1


async def test_a_stream_that_takes_less_gets_the_rest(stream: Written) -> None:
    stream.most = 7
    lines = LineWriter(stream)
    lines.write("a line of some length")
    lines.flush()

    assert stream.getvalue() == b"a line of some length\n"


async def test_a_log_call_during_a_write_does_not_deadlock(stream: Written) -> None:
    """A finalizer that a garbage collection calls may log like this."""
    lines = LineWriter(stream)
    stream.meanwhile = lambda: lines.write("found")
    lines.write("one")
    lines.flush()
    lines.flush()  # the line that was logged meanwhile

    assert sorted(stream.getvalue().split()) == [b"found", b"one"]


def test_lines_of_a_second_loop_are_written_too(stream: Written) -> None:
    lines = LineWriter(stream)

    async def write(line: str, *, wait: bool) -> None:
        lines.write_soon(lambda: line)
        await asyncio.sleep(3 * BATCH_S if wait else 0)

    asyncio.run(write("first", wait=False))
    asyncio.run(write("second", wait=True))

    assert stream.getvalue() == b"first\nsecond\n"


async def test_lines_of_threads_are_whole(stream: Written) -> None:
    lines = LineWriter(stream)

    def write_many(number: int) -> None:
        for _ in range(200):
            lines.write(f"{number} " * 100)

    threads = [threading.Thread(target=write_many, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        lines.write_soon(lambda: "request")
        await asyncio.sleep(0)
    for thread in threads:
        thread.join()
    lines.flush()

    found = {line for line in stream.getvalue().splitlines() if line != b"request"}
    assert found == {f"{n} ".encode() * 100 for n in range(4)}
    assert stream.getvalue().count(b"\n") >= 800


async def test_an_unread_log_stream_fails_no_request(stream: Written) -> None:
    def fail() -> None:
        raise BrokenPipeError

    lines = LineWriter(stream)
    for _ in range(BATCH_LINES):
        stream.meanwhile = fail
        lines.write_soon(lambda: "request")
    stream.meanwhile = fail
    lines.write("warning")
    lines.flush()
    lines.write("later")
    lines.flush()

    assert stream.getvalue() == b"later\n"


@pytest.mark.fault(117)
def test_a_stream_that_is_not_read_delays_nothing_and_holds_a_bounded_number_of_lines(
    stream: Written,
) -> None:
    read, started = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        read.wait()

    stream.meanwhile = hang
    lines = LineWriter(stream)
    lines.write("first")
    assert started.wait(10)
    for number in range(2 * MAX_LINES):
        lines.write(str(number))

    assert stream.getvalue() == b""
    assert lines.dropped == MAX_LINES + 1
    with structlog.testing.capture_logs() as logs:
        read.set()
        lines.flush()
        lines.flush()
    assert stream.getvalue().split() == [b"first", *(b"%d" % n for n in range(MAX_LINES - 1))]
    event = "log lines dropped: the log stream was not read in time"
    assert logs == [{"event": event, "log_level": "warning", "count": MAX_LINES + 1}]
    lines.write("later")
    lines.flush()
    assert stream.getvalue().endswith(b"\nlater\n")


def test_a_line_that_cannot_be_rendered_ends_no_log(stream: Written) -> None:
    def fail() -> str:
        raise ValueError

    async def write() -> None:
        lines.write_soon(fail)

    lines = LineWriter(stream)
    asyncio.run(write())
    lines.write("later")
    lines.flush()

    assert stream.getvalue() == b"a log line could not be rendered: ValueError\nlater\n"


def test_a_process_exits_although_its_log_stream_is_not_read(stream: Written) -> None:
    never = threading.Event()

    def hang() -> None:
        never.wait()

    stream.meanwhile = hang
    lines = LineWriter(stream)
    lines.write("line")
    started_s = time.monotonic()
    lines.flush()
    assert time.monotonic() - started_s >= EXIT_S
    never.set()


def test_lines_are_written_once_a_thread_can_be_started(
    stream: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    lines = LineWriter(stream)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        lines.write("first")
    lines.write("second")
    lines.flush()

    assert stream.getvalue() == b"first\nsecond\n"


@pytest.mark.parametrize("log_format", ["json", "console"])
@pytest.mark.parametrize("worker", [None, 3])
def test_request_lines_equal_those_of_structlog(log_format: str, worker: int | None) -> None:
    first, second = ran(REQUESTS.format(log_format=log_format, worker=worker) + TWICE, 0)

    if log_format == "json":
        ours, its = orjson.loads(first), orjson.loads(second)
        assert ours.pop("timestamp")[:10] == its.pop("timestamp")[:10]
        assert ours == its
        assert ours["items"] == "hit=2"
    else:
        (when, _, ours), (other, _, its) = (line.partition(b" ") for line in (first, second))
        assert when[:10] == other[:10]
        assert len(when) == len(other) == len("2026-01-01T00:00:00.000000Z")
        assert ours == its


def test_buffered_lines_are_written_at_exit() -> None:
    [line] = ran(REQUESTS.format(log_format="json", worker=None) + EXIT, 3)

    assert orjson.loads(line)["request_id"] == "a b"


def wait_for_bytes(stream: Written, limit_s: float = 10.0) -> bytes:
    """Block until the thread has written, up to a limit; return what it has written."""
    end_s = time.monotonic() + limit_s
    while not stream.getvalue() and time.monotonic() < end_s:
        time.sleep(0.001)
    return stream.getvalue()


def ran(code: str, status: int) -> list[bytes]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == status, done.stderr.decode()
    return done.stderr.splitlines()
