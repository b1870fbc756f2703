"""Recognition of clients that send a request on their own behalf, to an address of this machine."""

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from epd.edge.access import is_loopback, is_own

HERE = {"Host": "127.0.0.1:8000"}


def own(headers: dict[str, str]) -> bool:
    return is_own(CIMultiDictProxy(CIMultiDict(headers)))


@pytest.mark.security("S3")
@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", "localhost"]
)
def test_loopback_addresses_are_this_machine_alone(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.security("S3")
@pytest.mark.parametrize(
    "host",
    [
        *("10.0.0.1", "192.168.0.1", "203.0.113.9", "0.0.0.0", "::", "fe80::1%eth0"),  # noqa: S104
        *("::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "localhost.evil.test", "", None),
    ],
)
def test_other_hosts_are_not(host: str | None) -> None:
    assert not is_loopback(host)


@pytest.mark.security("S3")
@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000"])
def test_a_request_to_a_loopback_host_is_the_clients_own(host: str) -> None:
    assert own({"Host": host})


@pytest.mark.security("S3")
@pytest.mark.parametrize(
    "host",
    ["epd", "127.0.0.1.evil.test", "evil.test:8000", "localhost.evil.test", "", "[", "[::1", "@"],
)
def test_a_request_to_another_name_is_not(host: str) -> None:
    assert not own({"Host": host})


def test_a_request_without_a_host_is_not() -> None:
    assert not own({})


@pytest.mark.security("S3")
@pytest.mark.parametrize(
    "name",
    [
        *("forwarded", "X-FORWARDED-FOR", "x-real-ip", "Via", "Origin", "Sec-Fetch-Site"),
        *("X-Forwarded-Proto", "X-Forwarded-Host", "x-forwarded-port", "X-Envoy-External-Address"),
        *("x-envoy-attempt-count", "CF-Connecting-IP", "cf-ray", "True-Client-IP", "X-Client-IP"),
        *("X-Cluster-Client-Ip", "Fastly-Client-IP"),
    ],
)
def test_a_forwarded_request_is_not(name: str) -> None:
    assert not own(HERE | {name: ""})


@pytest.mark.parametrize("name", ["X-Forward", "User-Agent", "X-Request-Id", "X-CF"])
def test_other_headers_do_not_matter(name: str) -> None:
    assert own(HERE | {name: "127.0.0.1"})
