"""Log lines of a process."""

import subprocess
import sys

import orjson
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from epd.observe.logs import plain_line
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
