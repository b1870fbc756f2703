"""Log lines, as a process writes them."""

import subprocess
import sys

import orjson
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from epd.events import RequestDone
from epd.observe.logs import LogObserver, plain

LIBRARY = "import logging; logging.getLogger('library').{call}"
CONFIGURED = "from epd.observe.logs import configure; configure('json', 'info'); " + LIBRARY


FULL = structlog.dev.ConsoleRenderer(colors=False)
TEXTS = st.text(st.sampled_from("ab =\"'\t\r\n[]\x1b\u00e9"), max_size=8)
VALUES = st.one_of(TEXTS, st.integers(), st.floats(), st.none(), st.lists(TEXTS, max_size=2))
NAMES = st.one_of(
    st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
    st.sampled_from(["exception", "stack", "logger", "logger_name"]),
)


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


@given(
    text=st.text(max_size=40),
    level=st.sampled_from(["debug", "info", "warning", "critical"]),
    fields=st.dictionaries(
        NAMES.filter(lambda name: name not in {"event", "level", "timestamp"}), VALUES, max_size=4
    ),
)
def test_a_line_for_people_is_what_structlog_makes_of_it(
    text: str, level: str, fields: dict[str, object]
) -> None:
    special: dict[str, object] = {
        name: str(fields[name]) for name in ("exception", "stack") if name in fields
    }
    event: dict[str, object] = {
        **fields,
        **special,
        "timestamp": "2026-01-01T00:00:00Z",
        "level": level,
    }
    event["event"] = text

    assert plain(FULL, None, level, dict(event)) == FULL(None, level, dict(event))


def test_each_line_says_which_worker_wrote_it() -> None:
    code = "from epd.observe.logs import configure; configure('{}', 'info', worker=3); "
    code += "import structlog; "
    code += "structlog.get_logger('epd').info('listening', url='http://a b', n=2)"
    lines = []
    for log_format in ("json", "console"):
        command = [sys.executable, "-c", code.format(log_format)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        lines.append(ran.stderr.splitlines())
    ([json_line], [console_line]) = lines

    said = orjson.loads(json_line)
    assert (said["event"], said["worker"], said["url"], said["n"]) == (
        "listening",
        3,
        "http://a b",
        2,
    )
    assert console_line.endswith(
        "[info     ] listening                      n=2 url='http://a b' worker=3"
    )


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
