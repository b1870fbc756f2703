from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.media.cache import (
    ENTRY_OVERHEAD_BYTES,
    HEADERS,
    MAX_SECONDS,
    CachedMedia,
    CacheKey,
    Media,
    MediaCache,
    fresh_s,
    may_keep,
    revalidated_headers,
    revalidation_headers,
)

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def at(seconds: int) -> str:
    return format_datetime(NOON + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0),
        ({"Cache-Control": "max-age=60"}, 60),
        ({"Cache-Control": 'public, MAX-AGE = "60"'}, 60),
        ({"Cache-Control": "max-age=60", "Age": "45"}, 15),
        ({"Cache-Control": "max-age=60", "Age": "90"}, 0),
        ({"Cache-Control": "max-age=60, s-maxage=5"}, 5),
        ({"Cache-Control": "max-age=60,max-age=7"}, 7),
        ({"Cache-Control": "max-age=60, no-cache"}, 0),
        ({"Cache-Control": "max-age=60, no-store"}, 0),
        ({"Cache-Control": 'max-age=60, no-cache="Set-Cookie, X"'}, 0),
        ({"Cache-Control": 'private="a, max-age=60", max-age=3'}, 3),
        ({"Cache-Control": "max-age=-1"}, 0),
        ({"Cache-Control": "max-age=1.5"}, 0),
        ({"Cache-Control": "max-age"}, 0),
        ({"Cache-Control": "max-age=" + "0" * 5000}, 0),
        ({"Cache-Control": "max-age=" + "9" * 5000}, MAX_SECONDS),
        ({"Expires": at(30), "Date": at(0)}, 30),
        ({"Expires": at(30)}, 0),
        ({"Expires": "0", "Date": at(0)}, 0),
        ({"Expires": at(30), "Date": at(0), "Cache-Control": "max-age=2"}, 2),
        ({"Last-Modified": at(-(10**6)), "Date": at(0)}, 0),
    ],
)
def test_freshness_of_an_answer_follows_its_headers(headers: dict[str, str], seconds: int) -> None:
    assert seconds == fresh_s(headers)


@pytest.mark.parametrize(
    ("headers", "alone", "shared"),
    [
        ({}, True, True),
        ({"Cache-Control": "no-cache"}, True, True),
        ({"Cache-Control": "private, max-age=9"}, True, False),
        ({"Cache-Control": "max-age=9, No-Store"}, False, False),
        ({"Vary": "*"}, False, False),
        ({"Vary": "Accept"}, True, True),
    ],
)
def test_cacheability_of_an_answer_per_tenant_and_for_all(
    headers: dict[str, str], alone: bool, shared: bool
) -> None:
    assert alone == may_keep(headers, scope="tenant")
    assert shared == may_keep(headers, scope="")


@pytest.mark.parametrize(
    ("headers", "asked"),
    [
        ({}, {}),
        ({"ETag": '"1"'}, {"If-None-Match": '"1"'}),
        ({"ETag": 'W/"1"', "Last-Modified": at(-9), "Date": at(0)}, {"If-None-Match": 'W/"1"'}),
        ({"ETag": "1"}, {}),
        ({"ETag": '"\udc80"'}, {}),
        ({"Last-Modified": at(-1), "Date": at(0)}, {"If-Modified-Since": at(-1)}),
        ({"Last-Modified": at(0), "Date": at(0)}, {}),
        ({"Last-Modified": at(-9)}, {}),
        ({"Last-Modified": "yesterday", "Date": at(0)}, {}),
    ],
)
def test_versions_of_media_differ_by_their_validators(
    headers: dict[str, str], asked: dict[str, str]
) -> None:
    assert asked == revalidation_headers(headers)


def test_a_304_renews_the_cached_media() -> None:
    old = {"ETag": '"1"', "Cache-Control": "max-age=60", "Age": "50", "Date": at(0)}

    assert revalidated_headers(old, {"Date": at(70)}) == {
        "ETag": '"1"',
        "Cache-Control": "max-age=60",
        "Date": at(70),
    }
    assert fresh_s(revalidated_headers(old, {"Cache-Control": "no-cache"})) == 0


@given(
    st.dictionaries(
        st.sampled_from(HEADERS),
        st.text() | st.from_regex(r"(max-age|s-maxage|no-cache|private)=\"?[0-9]*\"?,?.*"),
    )
)
def test_any_headers_are_read(headers: dict[str, str]) -> None:
    assert 0 <= fresh_s(headers) < float("inf")
    assert may_keep(headers, "tenant") or not may_keep(headers, "")
    for value in revalidation_headers(headers).values():
        assert value in headers.values()
        assert value.isprintable()


def entry(size: int) -> CachedMedia:
    return CachedMedia(Media("", bytearray(size)), "https://a.test/", {}, 0.0)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5000) | st.none())),
    st.integers(0, 12000),
)
def test_the_cache_is_bounded_and_counts_its_bytes(
    steps: list[tuple[int, int | None]], budget: int
) -> None:
    cache = MediaCache(budget)
    last: dict[CacheKey, CachedMedia] = {}
    for name, size in steps:
        key = CacheKey("", "image", str(name))
        if size is None:
            cache.drop(key)
            last.pop(key, None)
        else:
            last[key] = entry(size)
            cache.put(key, last[key])

        kept = [cache.get(key) for key in last]
        assert all(found in (None, last[key]) for key, found in zip(last, kept, strict=True))
        assert cache.size_bytes == sum(found.cost_bytes for found in kept if found) <= budget


def test_the_least_recently_used_goes_first() -> None:
    cache = MediaCache(2 * (ENTRY_OVERHEAD_BYTES + 1))
    a, b, c = (CacheKey("", "image", name) for name in "abc")
    cache.put(a, entry(1))
    cache.put(b, entry(1))
    cache.get(a)
    cache.put(c, entry(1))

    assert [cache.get(key) is not None for key in (a, b, c)] == [True, False, True]
