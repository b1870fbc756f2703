"""Proxies of other hosts: what the server of a memory answers over TCP, and what ends there."""

import asyncio
import logging
import re
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ec_store import EntryInfo
from ec_store.access import is_key, is_loopback
from ec_store.arena.aio_store import AsyncArenaStore
from ec_store.arena.index import Client, Slot
from ec_store.arena.protocol import (
    MAX_REPLY_BYTES,
    VERSION,
    AnyRequest,
    Begin,
    ClaimKeys,
    Delete,
    Discard,
    End,
    Failed,
    Find,
    Forget,
    Frames,
    GetStats,
    Headers,
    Hello,
    List,
    Purge,
    Read,
    Register,
    Release,
    Reply,
    Unpin,
    Welcome,
    encode,
    read_reply,
)
from ec_store.arena.remote import MAX_HELLO_BYTES
from ec_store.arena.remote_url import remote_options
from ec_store.arena.url import ArenaOptions
from ec_store.errors import StoreUnavailable
from ec_store.testing.stores import key, sized
from ec_store.urls import check_proxy_url, check_url
from tests.certificates import Authority
from tests.ec_store.arena.remote import KEY, MIB, Host, free_port, opened, remote_host, sent

OTHER = bytes(32)
HELLO = encode(Hello(VERSION, "proxy", KEY))
FORBIDDEN: tuple[AnyRequest, ...] = (
    Forget(7),
    Read([OTHER]),
    Unpin([1]),
    Begin(OTHER, b"", 0, True),
    End(1, b"header"),
    Discard(1),
    Delete([OTHER]),
    Purge(b"namespace"),
    List(b""),
    Register(b"model", b"namespace"),
)
PERMITTED: tuple[AnyRequest, ...] = (
    Find([OTHER]),
    Find([OTHER], 1.0, True),
    ClaimKeys([OTHER], b"owner", 1.0, True),
    Release([OTHER], b"owner"),
    Register(b"", b""),
    GetStats(),
)
KEYS = [key(str(n)) for n in range(8)]


@pytest.fixture
async def host(path: Path) -> AsyncIterator[Host]:
    async with remote_host(path) as host:
        yield host


async def replies(port: int, *messages: bytes) -> list[Reply]:
    received = await sent(port, *messages)
    return [read_reply(body) for body in Frames(MAX_REPLY_BYTES).split(received)]


async def ended(host: Host) -> None:
    """Wait until the server has no connection over TCP any more."""
    async with asyncio.timeout(10):
        while host.remote._sessions:  # noqa: ASYNC110, SLF001 - it sets no event
            await asyncio.sleep(0.005)


async def test_lookup_lease_and_claim_are_those_of_the_memory(host: Host, path: Path) -> None:
    host.add(KEYS[0], sized(100))
    options = ArenaOptions(str(path), timeout_s=10)
    async with opened(host.options()) as store:
        local = AsyncArenaStore.from_options(options)
        for call in ("lookup", "claim_or_find"):
            more = () if call == "lookup" else ("owner", 10.0)
            found = await getattr(store, call)(KEYS, *more)
            assert found == await getattr(local, call)(KEYS, *more)
            assert isinstance(found[0], EntryInfo)
        [leased] = await store.lease(KEYS[:1], 30.0)
        assert leased is not None
        assert len(host.server.arena.index.leased(host.server.clock())) == 1
        assert await local.claim(KEYS[1:2], "other", 10.0) == [False]
        await store.release(KEYS[1:2], "owner")
        assert await local.claim(KEYS[1:2], "other", 10.0) == [True]
        await local.close()


async def test_proxies_of_other_hosts_read_the_namespaces_and_write_none(host: Host) -> None:
    host.server.arena.namespaces[b"model"] = b"its-namespace"
    async with opened(host.options()) as store:
        assert await store.namespaces() == {"model": "its-namespace"}
        assert not await store.put(key(), sized(0))
        with pytest.raises(StoreUnavailable, match="on that host alone"):
            await store.delete([key()])
        assert await store.lookup([key()]) == [None]


async def test_proxies_of_other_hosts_read_the_use_and_name_no_process(
    host: Host, path: Path
) -> None:
    host.add(KEYS[0], sized(100))
    writer = Client(pid=7, role="writer", writes={1: Slot(bytes(32), b"", 100, False)})
    host.server.arena.clients[99] = writer
    local = AsyncArenaStore.from_options(ArenaOptions(str(path), timeout_s=10))
    async with opened(host.options()) as store:
        found, here = await store.stats(), await local.stats()
        await local.close()

    assert (found.entries, found.bytes, found.max_bytes, found.evictions) == (
        here.entries,
        here.bytes,
        8 * MIB,
        0,
    )
    assert found.memory is not None
    assert here.memory is not None
    assert [use.pid for use in here.memory.uses] == [7]
    assert found.memory.uses == []


@pytest.mark.fault(150)
async def test_claims_end_with_the_connection(host: Host) -> None:
    async with opened(host.options()) as store, opened(host.options()) as other:
        assert await store.claim(KEYS, "owner", 60.0) == [True] * 8
        assert await other.claim(KEYS, "another", 60.0) == [False] * 8
        await store.close()
        async with asyncio.timeout(10):
            while await other.claim(KEYS, "another", 60.0) != [True] * 8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.fault(150)
@pytest.mark.parametrize(
    "hello",
    [
        Hello(VERSION, "proxy"),
        Hello(VERSION, "proxy", "another key"),
        Hello(VERSION, "proxy", KEY + "x"),
        Hello(VERSION, "proxy", KEY[:-1]),
        Hello(VERSION + 1, "proxy", "another key"),
    ],
    ids=["none", "other", "longer", "shorter", "version"],
)
async def test_a_peer_with_another_key_is_refused(host: Host, hello: Hello) -> None:
    [failed] = await replies(host.port, encode(hello), encode(Find([OTHER])))

    assert isinstance(failed, Failed)
    assert "EC_STORE_API_KEY" in failed.text
    assert KEY not in failed.text


@pytest.mark.fault(150)
async def test_a_peer_of_another_version_is_refused_by_name(host: Host) -> None:
    [failed] = await replies(host.port, encode(Hello(VERSION + 1, "proxy", KEY)))

    assert isinstance(failed, Failed)
    assert f"version {VERSION}" in failed.text


@pytest.mark.fault(152)
@pytest.mark.parametrize("role", ["reader", "writer"])
async def test_no_descriptor_of_the_memory_is_sent(host: Host, role: str) -> None:
    [failed] = await replies(host.port, encode(Hello(VERSION, role, KEY)))  # type: ignore[arg-type]

    assert isinstance(failed, Failed)
    assert role in failed.text


@pytest.mark.fault(152)
@pytest.mark.parametrize("request_", FORBIDDEN, ids=lambda request: type(request).__name__)
async def test_forbidden_requests_end_the_connection(host: Host, request_: AnyRequest) -> None:
    host.add(KEYS[0], sized(100))
    welcome, *rest = await replies(host.port, HELLO, encode(request_), encode(Find([OTHER])))

    assert isinstance(welcome, Welcome)
    assert (welcome.session, welcome.size_bytes) == (0, 0)
    assert [type(reply) for reply in rest] == [Failed]
    async with opened(host.options()) as store:
        assert (await store.lookup(KEYS[:1]))[0] is not None


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Bytes of a connection: a first request, or none, and requests of which one is spoiled."""
    hello = draw(st.sampled_from([HELLO, b"", encode(Hello(VERSION, "proxy", "wrong"))]))
    parts = [encode(draw(st.sampled_from(PERMITTED))) for _ in range(draw(st.integers(0, 3)))]
    last = encode(draw(st.sampled_from([*PERMITTED, *FORBIDDEN])))
    place = draw(st.integers(0, len(last) - 1))
    spoiled = draw(
        st.sampled_from([last, last[:place], last[:place] + b"\xc1" + last[place + 1 :]])
        | st.binary(max_size=60)
    )
    return b"".join([hello, *parts, spoiled])


@pytest.mark.fault(150)
@given(stream=streams())
@example(stream=(MAX_HELLO_BYTES + 1).to_bytes(4, "little") + bytes(8))
@example(stream=b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_bytes_that_no_proxy_sends_end_their_connection_alone(path: Path, stream: bytes) -> None:
    async def scenario() -> None:
        async with remote_host(path) as host, opened(host.options()) as store:
            host.add(KEYS[0], sized(100))
            assert await store.claim(KEYS[1:2], "owner", 60.0) == [True]
            received = await replies(host.port, stream)
            if not stream.startswith(HELLO):
                assert not any(isinstance(reply, Headers) for reply in received)
            [found] = await store.lookup(KEYS[:1])
            assert found is not None
            assert await store.claim(KEYS[1:2], "another", 1.0) == [False]

    asyncio.run(scenario())


@pytest.mark.fault(151)
async def test_a_host_has_half_of_the_connections(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with remote_host(path, max_connections=8) as host, opened(host.options()) as store:
        await store.check()
        others = [await asyncio.open_connection("127.0.0.1", host.port) for _ in range(5)]
        # Those without a first request count from the beginning; the fifth is closed at once.
        async with asyncio.timeout(10):
            ends = [asyncio.create_task(reader.read()) for reader, _ in others]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.05)
        assert sum(end.done() for end in ends) == 2
        assert len(done) >= 1
        assert "which may have half" in caplog.text
        await store.check()
        for _, writer in others:
            writer.close()
        await asyncio.gather(*ends, return_exceptions=True)
        async with asyncio.timeout(10):
            while len(host.remote._sessions) > 1:  # noqa: ASYNC110, SLF001
                await asyncio.sleep(0.005)
        async with opened(host.options()) as another:
            await another.check()


@pytest.mark.fault(151)
async def test_a_connection_without_a_first_request_is_closed(path: Path) -> None:
    async with remote_host(path, hello_s=0.05) as host:
        reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
        async with asyncio.timeout(3):
            assert await reader.read() == b""
        writer.close()
        await ended(host)


@pytest.mark.fault(153)
async def test_a_restarted_server_is_used_again(path: Path) -> None:
    port = free_port()
    async with remote_host(path, port=port) as host:
        store = opened(host.options())
        remote = await store.__aenter__()
        host.add(KEYS[0], sized(100))
        [found] = await remote.lookup(KEYS[:1])
        assert found is not None
    with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port}"):
        await remote.lookup(KEYS[:1])
    async with remote_host(path, port=port), asyncio.timeout(10):
        while True:
            try:
                assert await remote.lookup(KEYS[:1]) == [None]  # its memory is a new one
                break
            except StoreUnavailable:
                await asyncio.sleep(0.02)
        await store.__aexit__(None, None, None)


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")


def server_tls(authority: Authority, name: str = "localhost") -> ssl.SSLContext:
    certificate = authority.issue(name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.chain, certificate.key)
    return context


@needs_openssl
async def test_tls_verifies_the_server_by_its_name(path: Path, tmp_path: Path) -> None:
    authority = Authority.made(tmp_path)
    async with remote_host(path, server_tls(authority)) as host:
        secure = {"secure": True, "host": "localhost", "ssl_ca_certs": str(authority.ca)}
        async with opened(host.options(**secure)) as store:
            await store.check()
        by_name = {"host": "127.0.0.1", "server_name": "localhost"}
        async with opened(host.options(**secure | by_name)) as store:
            await store.check()
        for changes in (
            {"host": "127.0.0.1"},
            {"server_name": "another"},
            {"ssl_ca_certs": None},
        ):
            async with opened(host.options(**secure | changes)) as store:
                with pytest.raises(StoreUnavailable, match="certificate verify failed"):
                    await store.check()
        await ended(host)


@pytest.mark.fault(150)
@needs_openssl
async def test_bytes_without_tls_end_their_connection_alone(path: Path, tmp_path: Path) -> None:
    authority = Authority.made(tmp_path)
    async with remote_host(path, server_tls(authority), hello_s=0.2) as host:
        secure = {"secure": True, "host": "localhost", "ssl_ca_certs": str(authority.ca)}
        async with opened(host.options(**secure)) as store:
            await store.check()
            assert await replies_or_none(host.port, HELLO) == b""
            _, silent = await asyncio.open_connection("127.0.0.1", host.port)
            async with opened(host.options()) as plain:
                with pytest.raises(StoreUnavailable):
                    await plain.check()
            await store.check()
            async with asyncio.timeout(3):
                while len(host.remote._sessions) > 1:  # noqa: ASYNC110, SLF001
                    await asyncio.sleep(0.01)
            silent.close()


async def replies_or_none(port: int, message: bytes) -> bytes:
    """Return the messages of the protocol in what the server sends; TLS's own alerts are none."""
    received = await sent(port, message)
    return b"" if received[:1] in {b"", b"\x15"} else received


@pytest.mark.parametrize("changes", [{"server_name": ".store"}, {"host": "a..b"}])
async def test_a_name_that_no_server_can_have_is_the_reason(
    host: Host, changes: dict[str, str]
) -> None:
    async with opened(host.options(secure=True, **changes)) as store:
        with pytest.raises(StoreUnavailable, match="label empty"):
            await store.check()


def test_keys_are_compared_whole() -> None:
    assert is_key("a", "a")
    assert not is_key("a", "")
    assert not is_key("a", "ab")
    assert [is_loopback(host) for host in ("127.0.0.2", "::1", "localhost", "10.0.0.1", "h")] == [
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("shm+tcp://host:x", "host:port"),
        ("shm+tcp://host:0", "host:port"),
        ("shm+tcp://host/path", "host:port"),
        ("shm+tcp://key@host", "not in the URL"),
        ("shm+tcp://host?ssl_ca_certs=/ca", "ssl_ca_certs needs a shm+tls"),
        ("shm+tcp://host?server_name=store", "server_name needs a shm+tls"),
        ("shm+tls://host?server_name=", "server_name must not be empty"),
        ("shm+tls://host?ssl_ca_certs=", "ssl_ca_certs must not be empty"),
        ("shm+tls://host?timeout=0s", "greater than 0"),
        ("shm+tls://host?max_bytes=1GiB", "unknown parameter"),
    ],
)
def test_invalid_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        remote_options(url, {"EC_STORE_API_KEY": KEY})


def test_urls_have_a_default_port_and_no_secret_is_shown() -> None:
    url = "shm+tls://[::1]?ssl_ca_certs=/ca&server_name=store"
    options = remote_options(url, {"EC_STORE_API_KEY": KEY})

    assert options.at("10.0.0.1", 1).server_name == "store"
    assert (options.host, options.port, options.secure) == ("::1", 8101, True)
    assert KEY not in repr(options)
    for bad in ("", "ä", "x" * 513):
        with pytest.raises(ValueError, match="EC_STORE_API_KEY"):
            remote_options("shm+tcp://host", {"EC_STORE_API_KEY": bad})


def test_only_a_proxy_accepts_the_memory_of_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EC_STORE_API_KEY", KEY)
    assert check_proxy_url("shm+tcp://host:1") == "shm+tcp://host:1"
    with pytest.raises(ValueError, match="is for a proxy"):
        check_url("shm+tcp://host:1")


def serve(path: Path, *flags: str, key: str = KEY) -> subprocess.Popen[str]:
    url = f"shm://{path}?max_bytes=16MiB"
    return subprocess.Popen(
        [sys.executable, "-m", "ec_store", "serve", url, "--port", "0", *flags],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={"EC_STORE_API_KEY": key, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path.cwd())},
    )


def line_with(process: subprocess.Popen[str], text: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return line
    raise AssertionError(f"it has ended without {text!r}")


@pytest.mark.parametrize(
    ("flags", "key_", "message"),
    [
        (["--listen", "127.0.0.1:1"], "", "needs a key over TCP"),
        (["--listen", "0.0.0.0:1"], KEY, "needs --advertise"),
        (["--advertise", "host:1"], KEY, "--advertise needs --listen"),
        (["--listen", "host:1:2"], KEY, "must be HOST:PORT"),
        (["--listen", "127.0.0.1", "--ssl-certfile", "/none"], KEY, "need each other"),
        (
            ["--listen", "127.0.0.1", "--ssl-certfile", "/none", "--ssl-keyfile", "/none"],
            KEY,
            "/none: No such file",
        ),
    ],
)
def test_unusable_flags_are_refused(path: Path, flags: list[str], key_: str, message: str) -> None:
    with serve(path, *flags, key=key_) as process:
        _, errors = process.communicate(timeout=60)

    assert process.returncode == 2
    assert message in errors


def test_a_network_without_tls_is_warned_about(path: Path) -> None:
    flags = ["--listen", f"0.0.0.0:{free_port()}", "--advertise", "host:1"]
    with serve(path, *flags) as process:
        assert "--ssl-certfile" in line_with(process, "can read the key")
        assert "shm+tcp://host:1" in line_with(process, "proxies of other hosts")
        process.kill()


@needs_openssl
async def test_a_certificate_is_read_again_at_sighup(path: Path, tmp_path: Path) -> None:
    first, second = (Authority.made(tmp_path / name) for name in made(tmp_path, "a", "b"))
    port, issued = free_port(), first.issue()
    flags = ["--listen", f"localhost:{port}", *issued.flags]
    with serve(path, *flags) as process:
        try:
            line_with(process, f"shm+tls://localhost:{port}")
            await checked(f"shm+tls://localhost:{port}?ssl_ca_certs={first.ca}")
            issued.key.write_text("no key")
            process.send_signal(signal.SIGHUP)
            line_with(process, "stays as it was")
            await checked(f"shm+tls://localhost:{port}?ssl_ca_certs={first.ca}")
            renewed = second.issue()
            issued.chain.write_bytes(renewed.chain.read_bytes())
            issued.key.write_bytes(renewed.key.read_bytes())
            process.send_signal(signal.SIGHUP)
            line_with(process, "again")
            await checked(f"shm+tls://localhost:{port}?ssl_ca_certs={second.ca}")
        finally:
            process.kill()


def made(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).mkdir()
    return list(names)


async def checked(url: str) -> None:
    async with opened(remote_options(url, {"EC_STORE_API_KEY": KEY})) as store:
        await store.check()


async def test_a_wrong_key_is_logged_without_it(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        await replies(host.port, encode(Hello(VERSION, "proxy", "guess")))

    assert "127.0.0.1" in caplog.text
    assert "guess" not in caplog.text
