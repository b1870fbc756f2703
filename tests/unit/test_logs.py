"""Log lines, as a process writes them."""

import subprocess
import sys

import orjson
import pytest
import structlog

from epd.events import RequestDone
from epd.logs import LogObserver

LIBRARY = "import logging; logging.getLogger('library').{call}"
CONFIGURED = "from epd.logs import configure; configure('json', 'info'); " + LIBRARY


def written(call: str) -> list[dict[str, str]]:
    command = [sys.executable, "-c", CONFIGURED.format(call=call)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return [orjson.loads(line) for line in ran.stderr.splitlines()]


def test_what_a_library_warns_of_is_a_line_like_ours() -> None:
    [line] = written("warning('%s is away', 'the store')")

    assert (line["event"], line["level"], line["logger"]) == (
        "the store is away",
        "warning",
        "library",
    )


@pytest.mark.parametrize("call", ["info('fine')", "debug('finer')"])
def test_what_a_library_says_beside_is_not_written(call: str) -> None:
    assert written(call) == []


@pytest.mark.fault(33)
@pytest.mark.parametrize(
    ("kv_wait_s", "level"), [(None, "info"), (14.9, "info"), (15.1, "warning")]
)
def test_half_of_a_lease_is_a_warning(kv_wait_s: float | None, level: str) -> None:
    done = RequestDone(
        request_id="r",
        method="POST",
        path="/v1/chat/completions",
        status=200,
        seconds=20.0,
        error=None,
        reason=None,
        stages=(),
        items={},
        retries=0,
        kv_wait_s=kv_wait_s,
    )
    with structlog.testing.capture_logs() as lines:
        LogObserver(30.0).request_done(done)

    assert [line["log_level"] for line in lines] == [level]
