"""Log lines, as a process writes them."""

import subprocess
import sys

import orjson
import pytest

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
