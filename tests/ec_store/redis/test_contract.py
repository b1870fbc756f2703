"""Contract of stores on Redis: plain, with TLS and a restricted user, tiny windows, cluster."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from ec_store import EntryKey
from ec_store.redis.entries import WINDOW_BYTES
from ec_store.redis.store import RedisStore
from ec_store.redis.url import redis_options
from ec_store.testing.claims import ClaimsContract
from ec_store.testing.stores import Opened, Spoil, StoreContract
from tests.support.redis_server import Certificates, RedisServer, cluster, has_tls

ACL = (
    "epd on >s3cret resetkeys resetchannels ~epd:* -@all +get +set +getrange +strlen +pttl"
    " +pexpire +unlink +hset +hgetall +hdel +scan +info"
)
CLUSTER_ACL = ACL + " +cluster|slots +asking"
TINY_BYTES = 1024
"""Window of reads in which small entries need many."""

PATIENCE = "timeout=60s&connect_timeout=30s"
"""Long timeouts, so that no call fails because the machine is busy."""


def spoiler(client_of: Callable[[bytes], "redis.Redis"]) -> Spoil:
    """Return a function that changes the last byte of an entry."""

    def spoil(key: EntryKey) -> None:
        name = f"epd:ec:{{{key.digest}}}:e2".encode()
        client: Any = client_of(name)
        value = client.get(name)
        client.setrange(name, len(value) - 1, bytes([value[-1] ^ 1]))

    return spoil


def opener(
    url: str, clients: Sequence["redis.Redis"], window_bytes: int = WINDOW_BYTES
) -> Iterator[Opened]:
    for client in clients:
        client.flushall()
    options = redis_options(f"{url}{'&' if '?' in url else '?'}{PATIENCE}")
    with ExitStack() as stack:
        yield lambda: stack.enter_context(RedisStore(options, window_bytes=window_bytes))


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if not has_tls():
        pytest.skip("this redis-server was built without TLS")
    folder = tmp_path_factory.mktemp("redis-tls")
    with RedisServer(folder, {"user": ACL}, Certificates.make(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[RedisServer]]:
    """Yield a cluster, with TLS if available; test_faults uses one without."""
    folder = tmp_path_factory.mktemp("cluster")
    with cluster(folder, tls=Certificates.make(folder) if has_tls() else None) as servers:
        for server in servers:
            server.command("ACL", "SETUSER", *CLUSTER_ACL.split())
        yield servers


class TestRedis(StoreContract, ClaimsContract):
    entries_of_two = None
    window_bytes = WINDOW_BYTES

    @pytest.fixture
    def opened(self, server: RedisServer) -> Iterator[Opened]:
        yield from opener(server.url(), [server.client], self.window_bytes)

    @pytest.fixture
    def spoil(self, server: RedisServer) -> Spoil:
        return spoiler(lambda _: server.client)


class TestRedisInWindows(TestRedis):
    window_bytes = TINY_BYTES


class TestRedisWithTlsAndAcl(StoreContract, ClaimsContract):
    entries_of_two = None

    @pytest.fixture
    def opened(self, tls_server: RedisServer) -> Iterator[Opened]:
        assert tls_server.tls is not None
        url = f"rediss://epd:s3cret@127.0.0.1:{tls_server.port}/?ssl_ca_certs={tls_server.tls.ca}"
        yield from opener(url, [tls_server.client])

    @pytest.fixture
    def spoil(self, tls_server: RedisServer) -> Spoil:
        return spoiler(lambda _: tls_server.client)


class TestRedisClusterWithTlsAndAcl(StoreContract, ClaimsContract):
    entries_of_two = None

    @pytest.fixture
    def opened(self, redis_cluster: Sequence[RedisServer]) -> Iterator[Opened]:
        server = redis_cluster[1]
        address = f"epd:s3cret@127.0.0.1:{server.port}"
        url = (
            f"rediss+cluster://{address}?ssl_ca_certs={server.tls.ca}"
            if server.tls
            else f"redis+cluster://{address}"
        )
        yield from opener(url, [server.client for server in redis_cluster], TINY_BYTES)

    @pytest.fixture
    def spoil(self, redis_cluster: Sequence[RedisServer]) -> Spoil:
        def owner(name: bytes) -> "redis.Redis":
            return redis_cluster[key_slot(name) * 3 // 16384].client

        return spoiler(owner)
