"""Log lines: in order, whole, and one write for many of them."""

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
from epd.observe.request_log import LogObserver
from epd.events import RequestRecord, StageDone
logs.configure({log_format!r}, "info", worker={worker})
urls = {{"encode_servers_urls": ("http://e:1",), "decode_servers_urls": ("http://d:1",)}}
observer = LogObserver(ProxyConfig(**urls))
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


def test_lines_are_one_write(stream: Written) -> None:
    lines = LineWriter(stream, batch_s=60)
    for number in range(100):
        lines.write(partial(str, number))
    lines.flush()

    assert len(stream.parts) == 1
    assert stream.getvalue().split() == [b"%d" % number for number in range(100)]


def test_a_line_that_is_no_requests_waits_for_no_others(stream: Written) -> None:
    lines = LineWriter(stream, batch_s=3600)
    lines.write(lambda: "request")
    LineLogger(lines).warning("warning")
    while stream.getvalue() != b"request\nwarning\n":
        time.sleep(0.001)


def test_a_line_is_written_without_a_flush(stream: Written) -> None:
    LineWriter(stream).write(lambda: "request")
    while stream.getvalue() != b"request\n":
        time.sleep(0.001)


def test_a_batch_is_written_in_parts_that_a_pipe_takes_as_one_piece(stream: Written) -> None:
    """Several workers share a pipe; a longer write may be interleaved with another's."""
    lines = LineWriter(stream, batch_s=60)
    for number in range(100):
        lines.write(partial("{} {}".format, number, "x" * 300))
    lines.write(lambda: "y" * 2 * WHOLE_BYTES)
    lines.flush()

    assert b"".join(stream.parts) == stream.getvalue()
    assert all(part.endswith(b"\n") for part in stream.parts)
    *parts, last, longer = map(len, stream.parts)
    assert max(*parts, last) <= WHOLE_BYTES < min(parts) + 303
    assert longer == 2 * WHOLE_BYTES + 1


def test_a_stream_that_takes_less_gets_the_rest(stream: Written) -> None:
    stream.most = 7
    lines = LineWriter(stream)
    lines.write(lambda: "a line of some length")
    lines.flush()

    assert stream.getvalue() == b"a line of some length\n"


def test_a_log_call_during_a_write_does_not_deadlock(stream: Written) -> None:
    """A finalizer that a garbage collection calls may log like this."""
    lines = LineWriter(stream)
    stream.meanwhile = lambda: lines.write(lambda: "found")
    lines.write(lambda: "one")
    lines.flush()
    lines.flush()  # the line that was logged meanwhile

    assert sorted(stream.getvalue().split()) == [b"found", b"one"]


def test_lines_of_threads_are_whole(stream: Written) -> None:
    lines = LineWriter(stream)

    def write_many(number: int) -> None:
        for _ in range(200):
            lines.write(lambda: f"{number} " * 100)

    threads = [threading.Thread(target=write_many, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines.flush()

    found = stream.getvalue().splitlines()
    assert sorted(found) == sorted(f"{n} ".encode() * 100 for n in range(4) for _ in range(200))


def test_an_unread_log_stream_fails_no_request(stream: Written) -> None:
    def fail() -> None:
        raise BrokenPipeError

    lines = LineWriter(stream)
    stream.meanwhile = fail
    lines.write(lambda: "request")
    lines.flush()
    lines.write(lambda: "later")
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
    lines.write(lambda: "first")
    assert started.wait(10)
    for number in range(2 * MAX_LINES):
        lines.write(partial(str, number))

    assert stream.getvalue() == b""
    assert lines.dropped == MAX_LINES
    with structlog.testing.capture_logs() as logs:
        read.set()
        lines.flush()
        lines.flush()
    assert stream.getvalue().split() == [b"first", *(b"%d" % n for n in range(MAX_LINES))]
    event = "log lines dropped: the log stream was not read in time"
    assert logs == [{"event": event, "log_level": "warning", "count": MAX_LINES}]
    lines.write(lambda: "later")
    lines.flush()
    assert stream.getvalue().endswith(b"\nlater\n")


def test_a_line_that_cannot_be_rendered_ends_no_log(stream: Written) -> None:
    def fail() -> str:
        raise ValueError

    lines = LineWriter(stream)
    lines.write(fail)
    lines.write(lambda: "later")
    lines.flush()

    assert stream.getvalue() == b"a log line could not be rendered: ValueError\nlater\n"


def test_a_process_exits_although_its_log_stream_is_not_read(stream: Written) -> None:
    never = threading.Event()

    def hang() -> None:
        never.wait()

    stream.meanwhile = hang
    lines = LineWriter(stream)
    lines.write(lambda: "line")
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
        lines.write(lambda: "first")
    lines.write(lambda: "second")
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


def ran(code: str, status: int) -> list[bytes]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == status, done.stderr.decode()
    return done.stderr.splitlines()
