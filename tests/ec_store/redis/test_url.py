"""Redis URLs: their options, and that messages never show the password."""

import logging
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from ec_store import StoreUnavailable, open_store
from ec_store.redis.store import RedisStore
from ec_store.redis.url import Address, Tls, redis_options
from ec_store.testing.stores import assert_same, key, sized
from tests.support.redis_server import Certificates, RedisServer, has_tls

SECRET = "s3cr3t/@:?#"
QUOTED = "s3cr3t%2F%40%3A%3F%23"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", {"requirepass": f'"{SECRET}"'}) as server:
        yield server


def test_a_url_with_everything() -> None:
    query = "ttl=1h&timeout=2s&connect_timeout=300ms&max_entry_bytes=2GiB&prefix=a"
    options = redis_options(
        f"rediss://user:{QUOTED}@host:1/3?ssl_ca_certs=ca&ssl_certfile=c&ssl_keyfile=k&{query}", {}
    )

    assert options.addresses == (Address("host", 1),)
    assert (options.username, options.password, options.db) == ("user", SECRET, 3)
    assert options.tls == Tls("ca", "c", "k")
    assert (options.ttl_s, options.timeout_s, options.connect_timeout_s) == (3600, 2, 0.3)
    assert (options.max_entry_bytes, options.prefix) == (2**31, "a")


def test_the_defaults() -> None:
    options = redis_options("redis://", {})

    assert options.addresses == (Address("localhost", 6379),)
    assert (options.username, options.password, options.tls) == (None, None, None)
    assert (options.ttl_s, options.prefix, options.max_entry_bytes) == (604800, "epd:ec", 2**29)


def test_a_cluster_with_several_nodes() -> None:
    options = redis_options("rediss+cluster://a:1,[::1]:2,c/", {})

    assert options.cluster
    assert options.tls == Tls()
    assert list(map(str, options.addresses)) == ["a:1", "[::1]:2", "c:6379"]


@pytest.mark.security("S18")
@pytest.mark.parametrize(
    "url",
    [
        "redis://h?password=s3cr3t",
        "redis://:s3cr3t/x@h",
        "redis://:s3cr3t@h:port",
        "redis://h:s3cr3t",
        "redis://h/s3cr3t",
        "redis://a,b",
        "redis+cluster://h/1",
        "redis://:s3cr3t@h?password_file=f",
        "redis://user@h",
        "redis://h?prefix={a}",
        "redis://h?prefix=*",
        "redis://h?prefix=",
        "redis://h?chunk_bytes=1MiB",
        "redis://h?timeout=0",
        "redis://h?ssl_ca_certs=ca",
        "redis://h?ttl=1d&ttl=2d",
        "redis://[h",
    ],
)
def test_a_wrong_url_is_refused_without_a_word_of_its_secret(url: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        redis_options(url, {})

    assert "s3cr3t" not in "".join(traceback.format_exception_only(caught.value))


def test_the_password_comes_from_the_environment_or_a_file(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\n")
    with open_store(server.url(f"password_file={file}")) as store:
        assert store.put(key(), sized(10)) is True
    monkeypatch.setenv("EC_STORE_REDIS_PASSWORD", SECRET)
    with open_store(server.url()) as store:
        assert_same(sized(10), store.get(key()))


def test_a_password_file_is_read_for_every_connection(server: RedisServer, tmp_path: Path) -> None:
    file = tmp_path / "password"
    with open_store(server.url(f"password_file={file}")) as store:
        with pytest.raises(StoreUnavailable, match="password file"):
            store.get(key())
        file.write_text("wrong")
        with pytest.raises(StoreUnavailable):
            store.get(key())
        file.write_text(SECRET)
        assert store.get(key()) is None


@pytest.mark.security("S18")
def test_the_password_is_in_no_message(
    server: RedisServer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    seen = []
    for url in (
        f"redis://:{QUOTED}@127.0.0.1:{server.port}?timeout=300ms",
        f"redis://nobody:{QUOTED}@127.0.0.1:{server.port}?timeout=300ms",
        f"redis://:{QUOTED}x@127.0.0.1:{server.port}?timeout=300ms",
        f"redis://:{QUOTED}@127.0.0.1:1",
        f"rediss://:{QUOTED}@127.0.0.1:{server.port}?timeout=300ms",
        f"rediss://:{QUOTED}@127.0.0.1:{server.port}?timeout=300ms&ssl_ca_certs={tmp_path}/none",
        f"redis+cluster://:{QUOTED}@127.0.0.1:{server.port}?timeout=300ms",
    ):
        store = RedisStore.from_url(url)
        seen += [repr(store), repr(redis_options(url, {}))]
        try:
            store.get(key())
        except StoreUnavailable as error:
            seen += traceback.format_exception(error)
        store.close()

    assert len(seen) > 14
    assert SECRET[:6] not in caplog.text + "".join(seen)


@pytest.mark.security("S18")
@pytest.mark.skipif(not has_tls(), reason="this redis-server was built without TLS")
def test_a_server_with_another_certificate_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").mkdir()
    theirs, ours = Certificates.make(tmp_path / "theirs"), Certificates.make(tmp_path / "ours")
    with RedisServer(tmp_path / "redis", {"tls-auth-clients": "yes"}, theirs) as server:
        mine = f"ssl_certfile={theirs.cert}&ssl_keyfile={theirs.key}"
        for query in (f"{mine}&ssl_ca_certs={ours.ca}", mine, f"ssl_ca_certs={theirs.ca}"):
            with (
                pytest.raises(StoreUnavailable),
                open_store(server.url(query, "rediss")) as store,
            ):
                store.get(key())
        with open_store(server.url(f"{mine}&ssl_ca_certs={theirs.ca}", "rediss")) as store:
            assert store.put(key(), sized(10)) is True
        with (
            pytest.raises(StoreUnavailable),
            open_store(server.url().replace("127.0.0.1", "localhost")) as store,
        ):
            store.get(key())
