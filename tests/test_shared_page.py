"""Shared memory page: reads are complete and never stale, even if a writer dies."""

import errno
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.shared_page import HALF_BYTES, HEAD, NUMBER, PageUnreadable, SharedPage

WRITES = """
import sys
from epd.shared_page import SharedPage
page = SharedPage(int(sys.argv[1]))
number = int(page.read() and page.read().split()[0] or 0)
print("writes", flush=True)
while True:
    number += 1
    page.write(b"%d " % number * (1 + number % 7 * 300))
"""


@pytest.fixture
def page() -> Iterator[SharedPage]:
    with closing(SharedPage.new_page()) as made:
        yield made


def writer(page: SharedPage) -> subprocess.Popen[bytes]:
    """Start another process that writes numbers as fast as it can."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITES, str(page.descriptor)],
        pass_fds=[page.descriptor],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"writes\n"
    return process


def number(page: SharedPage) -> int:
    """Return the number that a whole page repeats."""
    content = page.read()
    assert content is not None
    [one] = set(content.split())
    assert len(content.split()) == 1 + int(one) % 7 * 300
    return int(one)


def test_an_unwritten_page_reads_as_none(page: SharedPage) -> None:
    assert page.read() is None


@given(st.lists(st.binary(max_size=300), min_size=1))
def test_the_latest_page_is_read(contents: list[bytes]) -> None:
    with closing(SharedPage.new_page()) as page:
        for content in contents:
            page.write(content)

            assert page.read() == content


def test_a_reader_sees_only_whole_pages_and_never_an_older_one(page: SharedPage) -> None:
    with writer(page) as process:
        try:
            while page.read() is None:
                pass
            numbers = [number(page)]
            while len(numbers) < 500 or len(set(numbers)) < 20:
                numbers.append(number(page))
        finally:
            process.kill()

    assert numbers == sorted(numbers)


def test_a_killed_writer_leaves_a_whole_page(page: SharedPage) -> None:
    last = 0
    for _ in range(4):
        with writer(page) as process:
            while (page.read() is None) or number(page) == last:
                pass
            process.kill()
        assert number(page) > last
        last = number(page)


@given(st.binary(min_size=1, max_size=200), st.integers(0, 200))
def test_half_a_page_is_not_seen(torn: bytes, at: int) -> None:
    with closing(SharedPage.new_page()) as page:
        for content in (b"first", b"second"):
            page.write(content)
        os.pwrite(page.descriptor, torn, HEAD.size + HALF_BYTES + at)  # the place of the third one

        assert page.read() == b"second"
        page.write(b"third")
        assert page.read() == b"third"


def test_a_damaged_page_is_not_read(page: SharedPage) -> None:
    page.write(b"first")
    os.pwrite(page.descriptor, b"F", 2 * HEAD.size + HALF_BYTES)

    with pytest.raises(PageUnreadable):
        page.read()
    page.write(b"second")
    assert page.read() == b"second"


def test_an_older_page_is_not_returned_as_the_newest(page: SharedPage) -> None:
    page.write(b"first")
    os.pwrite(page.descriptor, NUMBER.pack(3), 0)  # a half that still has the first one

    with pytest.raises(PageUnreadable):
        page.read()


def test_a_page_that_does_not_fit_changes_nothing(page: SharedPage) -> None:
    page.write(b"first")
    with pytest.raises(OSError, match="File too large") as refused:
        page.write(bytes(HALF_BYTES))

    assert refused.value.errno == errno.EFBIG
    assert page.read() == b"first"


def test_shared_page_is_readable_only_by_its_user(page: SharedPage) -> None:
    assert os.fstat(page.descriptor).st_mode & 0o777 == 0o600


def test_a_page_is_wanted_for_a_while(page: SharedPage) -> None:
    now_s = 1000.0
    page = SharedPage(page.descriptor, lambda: now_s)

    assert not page.wanted_within(math.inf)
    page.write(b"1")
    assert not page.wanted_within(math.inf)
    SharedPage(page.descriptor, lambda: now_s).ask()
    now_s += 5

    assert page.wanted_within(5.1)
    assert not page.wanted_within(5)
    assert page.read() == b"1"
    assert page.write_count() == 1
