"""Hosts of instances: what a metrics page names, and which outputs are readable where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.routing.reports import Host, read_host

A = Host("shm+tls://a:8101", "aa", "cafe")
B = Host("shm+tls://b:8101", "bb", "cafe")


def line(host: Host, value: float = 1.0, engine: int = 0) -> str:
    labels = f'address="{host.address}",arena="{host.arena}",tier="{host.tier}"'
    name = "vllm:ec_store_host_info"
    return f'{name}{{engine="{engine}",model_name="m",{labels}}} {value}\n'


def page(*lines: str) -> bytes:
    return "".join(["# TYPE x gauge\n", *lines]).encode()


@pytest.mark.parametrize(
    ("lines", "host"),
    [
        ([line(A)], A),
        ([line(A), line(A, engine=1)], A),
        ([line(A), line(B, engine=1)], None),
        ([line(A, 0), line(B)], B),
        ([line(A, 0)], None),
        ([], None),
        ([line(A._replace(tier=""))], A._replace(tier="")),
        ([line(A._replace(address="http://a:1"))], None),
        ([line(A._replace(address="shm+tls://a/path"))], None),
        ([line(A._replace(arena="not hex"))], None),
        ([line(A), "vllm:ec_store_host_info{} 1\n"], None),
    ],
)
def test_the_common_server_of_all_engines_is_read(lines: list[str], host: Host | None) -> None:
    assert read_host(page(*lines)) == host


@given(st.binary(max_size=300))
def test_any_bytes_in_a_line_are_no_error(garbage: bytes) -> None:
    read_host(b"\nvllm:ec_store_host_info{" + garbage + b"} 1\n")


def test_outputs_are_readable_at_their_host_and_through_a_shared_tier() -> None:
    alone, other = A._replace(tier=""), B._replace(tier="")

    assert A.reaches(A._replace(arena="restarted", tier=""))
    assert A.reaches(B)
    assert not alone.reaches(other)
    assert not A.reaches(B._replace(tier="other"))
