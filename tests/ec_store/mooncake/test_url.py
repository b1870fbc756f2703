import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_store import check_url, redacted
from ec_store.mooncake.url import MooncakeOptions, mooncake_options


def test_every_parameter() -> None:
    url = (
        "mooncake://master:1234?metadata=http://m:8080/metadata&segment=64GiB&protocol=rdma"
        "&devices=mlx5_0,mlx5_1&host=10.0.0.1&prefix=a_b-1&replicas=2&max_entry_bytes=1GiB"
        "&timeout=2s&claims=redis://ec-redis:6379/1"
    )
    assert mooncake_options(url) == MooncakeOptions(
        master="master:1234",
        metadata="http://m:8080/metadata",
        segment_bytes=64 * 2**30,
        protocol="rdma",
        devices="mlx5_0,mlx5_1",
        host="10.0.0.1",
        prefix="a_b-1",
        replicas=2,
        max_entry_bytes=2**30,
        timeout_s=2.0,
        claims="redis://ec-redis:6379/1",
    )


def test_defaults() -> None:
    assert mooncake_options("mooncake://master") == MooncakeOptions(master="master:50051")
    assert mooncake_options("mooncake://[::1]:1").master == "[::1]:1"
    assert check_url("mooncake://master") == "mooncake://master"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("mooncake://", "must name the host"),
        ("mooncake://:50051", "must name the host"),
        ("mooncake://user@master", "without user and path"),
        ("mooncake://master/path", "without user and path"),
        ("mooncake://master:x", "host or host:port"),
        ("mooncake://master:99999", "host or host:port"),
        ("mooncake://master?segment=1MiB", "multiple of 16MiB"),
        ("mooncake://master?protocol=udp", "protocol must be one of tcp, rdma"),
        ("mooncake://master?prefix=a.b", "prefix must have"),
        ("mooncake://master?replicas=0", "replicas must be from 1 to 8"),
        ("mooncake://master?replicas=9", "replicas must be from 1 to 8"),
        ("mooncake://master?max_entry_bytes=1000KiB", "at least 1MiB"),
        ("mooncake://master?timeout=9ms", "at least 10ms"),
        ("mooncake://master?claims=http://x", "URL of a Redis"),
        ("mooncake://master?claims=redis%3A%2F%2Fu%3Asecret%40x", "EC_STORE_REDIS_PASSWORD"),
        ("mooncake://master?unknown=1", "unknown parameter"),
    ],
)
def test_an_invalid_url_is_refused(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        mooncake_options(url)

    assert "secret" not in str(caught.value)


def test_the_address_of_a_host_is_that_of_the_route_to_the_master() -> None:
    assert mooncake_options("mooncake://127.0.0.1:1").own_host() == "127.0.0.1"
    assert mooncake_options("mooncake://[::1]:1?host=a").own_host() == "a"


@given(st.text(max_size=80))
def test_any_text_is_options_or_a_value_error(text: str) -> None:
    try:
        options = mooncake_options(f"mooncake://{text}")
    except ValueError:
        return
    assert options.master
    assert redacted(f"mooncake://{text}")
