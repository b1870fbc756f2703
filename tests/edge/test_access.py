"""Recognition of local clients: a request from this machine, not on behalf of another."""

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from epd.edge.access import is_local

HERE = {"Host": "127.0.0.1:8000"}


def local(peer: str | None, headers: dict[str, str]) -> bool:
    return is_local(CIMultiDictProxy(CIMultiDict(headers)), peer)


@pytest.mark.security("S3")
@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000"])
def test_loopback_is_local(peer: str, host: str) -> None:
    assert local(peer, {"Host": host})


@pytest.mark.security("S3")
@pytest.mark.parametrize(
    "peer",
    [
        *("10.0.0.1", "192.168.0.1", "203.0.113.9", "0.0.0.0", "::", "fe80::1%eth0"),  # noqa: S104
        *("::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "localhost", "", None),
    ],
)
def test_other_peers_are_not(peer: str | None) -> None:
    assert not local(peer, HERE)


@pytest.mark.security("S3")
@pytest.mark.parametrize(
    "host",
    ["epd", "127.0.0.1.evil.test", "evil.test:8000", "localhost.evil.test", "", "[", "[::1", "@"],
)
def test_other_names_of_the_host_are_not(host: str) -> None:
    assert not local("127.0.0.1", {"Host": host})


def test_a_request_without_a_host_is_not() -> None:
    assert not local("127.0.0.1", {})


@pytest.mark.security("S3")
@pytest.mark.parametrize(
    "name", ["forwarded", "X-FORWARDED-FOR", "x-real-ip", "Via", "Origin", "Sec-Fetch-Site"]
)
def test_a_forwarded_request_is_not_local(name: str) -> None:
    assert not local("127.0.0.1", HERE | {name: ""})
