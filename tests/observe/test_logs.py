"""Log lines of a process."""

import subprocess
import sys
from collections.abc import MutableMapping
from typing import Any

import orjson
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from epd.config import ProxyConfig
from epd.events import RequestRecord, StageDone
from epd.observe.logs import plain_line
from epd.observe.request_log import LogObserver
from epd.routing.instances import Role

LIBRARY = """
import logging
from epd.observe.logs import configure
configure('json', 'info')
library = logging.getLogger('library')
library.debug('finer')
library.info('fine')
library.warning('%s is away', 'the store')
"""

FULL = structlog.dev.ConsoleRenderer(colors=False, sort_keys=False)
TEXTS = st.text(st.sampled_from("ab =\"'\t\r\n[]\x1b\u00e9"), max_size=8)
VALUES = st.one_of(
    TEXTS,
    st.sampled_from(Role),
    st.integers(),
    st.floats(),
    st.none(),
    st.lists(TEXTS, max_size=2),
)
NAMES = st.one_of(
    st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
    st.sampled_from(["exception", "stack", "logger", "logger_name"]),
)


@pytest.fixture(scope="module")
def written() -> list[dict[str, str]]:
    """Return the log lines of a process in which a library logs at three levels."""
    ran = subprocess.run(
        [sys.executable, "-c", LIBRARY], capture_output=True, text=True, check=True
    )
    return [orjson.loads(line) for line in ran.stderr.splitlines()]


def test_a_warning_of_a_library_is_a_line_of_the_log(written: list[dict[str, str]]) -> None:
    [line] = [line for line in written if line["level"] == "warning"]

    assert (line["event"], line["level"], line["logger"]) == (
        "the store is away",
        "warning",
        "library",
    )


@pytest.mark.parametrize("level", ["info", "debug"])
def test_other_messages_of_libraries_are_not_written(
    written: list[dict[str, str]], level: str
) -> None:
    assert level not in [line["level"] for line in written]


@given(
    text=st.text(max_size=40),
    level=st.sampled_from(["debug", "info", "warning", "critical"]),
    fields=st.dictionaries(
        NAMES.filter(lambda name: name not in {"event", "level", "timestamp"}), VALUES, max_size=4
    ),
)
def test_console_lines_equal_those_of_structlog(
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

    assert plain_line(FULL, None, level, dict(event)) == FULL(None, level, dict(event))


MOUNTED = """
import structlog
from epd import ProxyConfig, create_app
{before}
urls = ('http://127.0.0.1:9',)
create_app(ProxyConfig(encode_servers_urls=urls, decode_servers_urls=urls))
try:
    api_key = 'sk-' + 'secret'
    raise RuntimeError('a bug')
except RuntimeError:
    structlog.get_logger('epd').exception('bug')
"""


def test_a_mounted_application_logs_no_local_variables() -> None:
    said = of_mounted("")

    assert "RuntimeError: a bug" in said
    assert "sk-secret" not in said


def test_the_log_configuration_of_a_mounting_application_is_kept() -> None:
    before = "structlog.configure(processors=[lambda *_: 'its own form'])"

    assert of_mounted(before) == "its own form\n"


def of_mounted(before: str) -> str:
    """Return the error log of an application that runs this code before mounting the proxy."""
    code = MOUNTED.format(before=before)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ran.stdout + ran.stderr


@pytest.mark.fault(33)
@pytest.mark.parametrize(
    ("kv_wait_s", "level"), [(None, "info"), (14.9, "info"), (15.1, "warning")]
)
def test_half_of_a_lease_is_a_warning(kv_wait_s: float | None, level: str) -> None:
    assert line_of(request(kv_wait_s=kv_wait_s))["log_level"] == level


def request(**more: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "request_id": "r",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "seconds": 20.0,
        "error": None,
        "reason": None,
        "stages": (),
        "items": {},
        "retries": 0,
    }
    return RequestRecord(**{**fields, "engine_id": "r", **more})


def line_of(event: RequestRecord) -> MutableMapping[str, Any]:
    urls = {"encode_servers_urls": "http://e:1", "decode_servers_urls": "http://d:1"}
    config = ProxyConfig.model_validate(urls | {"kv_lease_s": 30})
    with structlog.testing.capture_logs() as lines:
        LogObserver(config).request_done(event)
    [line] = lines
    return line


def test_readiness_probe_is_logged_if_its_result_differs_from_the_last() -> None:
    urls = {"encode_servers_urls": "http://e:1", "decode_servers_urls": "http://d:1"}
    observer = LogObserver(ProxyConfig.model_validate(urls))
    with structlog.testing.capture_logs() as lines:
        for error in ("no_decode", "no_decode", None, None, "no_decode", "shutting_down"):
            for path in ("/ready", "/ping"):
                observer.request_done(RequestRecord("r", "GET", path, error=error))

    for path in ("/ready", "/ping"):
        levels = [line["log_level"] for line in lines if line["path"] == path]
        shown = [level for level in levels if level != "debug"]
        assert shown == ["warning", "info", "warning", "warning"]


def test_the_line_of_a_stream_names_its_instances_its_model_and_its_first_token() -> None:
    stages = (
        StageDone("encode", "http://e:1", 0.0, 0.1, None),
        StageDone("prefill", "http://p:1", 0.1, 0.1, None),
        StageDone("decode", "http://d:1", 0.2, 0.1, "decode_timeout"),
        StageDone("decode", "http://d:2", 0.3, 0.1, None),
    )
    line = line_of(
        request(
            stages=stages, model_name="m", stream=True, first_token_s=0.45678, answer_bytes=1234
        )
    )

    assert (line["prefill"], line["decode"], line["model"]) == ("http://p:1", "http://d:2", "m")
    assert (line["stream"], line["ttft_s"], line["answer_bytes"]) == (True, 0.4568, 1234)
    assert "encode" not in line


def test_the_line_of_a_whole_answer_has_no_time_to_first_token() -> None:
    line = line_of(request(first_token_s=0.5, answer_bytes=9))

    assert line["answer_bytes"] == 9
    assert {"stream", "ttft_s"}.isdisjoint(line)


def test_the_line_of_a_request_does_not_name_its_tenant() -> None:
    assert "alice" not in line_of(request(tenant="alice")).values()


def test_the_line_of_a_request_begins_with_how_it_ended() -> None:
    line = line_of(request(status=502, error="decode_died", reason="it broke off"))

    assert [*line][:6] == ["status", "seconds", "error", "reason", "method", "path"]
