"""Unix socket instead of an address: its file, workers, TLS, and which clients are local."""

import asyncio
import os
import shutil
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import pytest
from aiohttp import web

from epd import ProxyConfig, create_app
from epd.edge.listening import BACKLOG, listening_at
from tests.certificates import localhost_certificate
from tests.requests import request, text
from tests.support.fake_instance import FakeInstance, decodes, encodes, hangs
from tests.support.fleet import until
from tests.support.programs import INSTANCES, run, serving

pytestmark = pytest.mark.full

CHAT = "http://epd/v1/chat/completions"


@pytest.fixture
def path() -> Iterator[Path]:
    """Return a short path: the path of a socket is limited to 107 bytes."""
    with TemporaryDirectory(prefix="epd") as folder:
        yield Path(folder) / "s"


def client(path: Path) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)))


def stale(path: Path) -> None:
    """Leave a socket file, as a killed process does."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize("workers", ["1", "3"])
async def test_serve_listens_on_a_unix_socket_and_removes_its_file(
    path: Path, workers: str
) -> None:
    encode, decode = FakeInstance(encodes), FakeInstance(decodes)
    stale(path)
    async with encode.running(), decode.running():
        flags = ["--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url]
        with serving(*flags, "--uds", str(path), "--workers", workers) as (url, process):
            assert url == f"unix:{path}"
            async with client(path) as http:
                for _ in range(6):
                    async with http.post(CHAT, json=request(text())) as reply:
                        assert reply.status == 200
            process.terminate()

            assert await asyncio.to_thread(process.wait, 100) == 0
    assert list(path.parent.iterdir()) == []
    assert len(decode.calls) == 6


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
@pytest.mark.parametrize("workers", ["1", "2"])
async def test_serve_speaks_tls_on_a_unix_socket(path: Path, workers: str) -> None:
    pem = await asyncio.to_thread(localhost_certificate, path.parent)
    tls = ssl.create_default_context(cafile=str(pem))
    encode, decode = FakeInstance(encodes), FakeInstance(decodes)
    async with encode.running(), decode.running():
        flags = ["--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url]
        files = ["--ssl-certfile", str(pem), "--ssl-keyfile", str(pem)]
        with serving(*flags, *files, "--uds", str(path), "--workers", workers) as (_, process):
            # aiohttp's client does not support TLS on such sockets.
            reader, writer = await asyncio.open_unix_connection(
                path, ssl=tls, server_hostname="localhost"
            )
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            process.terminate()

            assert await asyncio.to_thread(process.wait, 100) == 0
    assert list(path.parent.iterdir()) == [pem]


async def test_a_draining_proxy_accepts_nothing_and_another_takes_its_place(path: Path) -> None:
    encode, decode = FakeInstance(encodes), FakeInstance(hangs)
    async with encode.running(), decode.running():
        flags = ["--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url]
        flags += ["--uds", str(path)]
        with serving(*flags) as (_, old), ExitStack() as stack:
            async with client(path) as http:
                asked = asyncio.ensure_future(http.post(CHAT, json=request(text())))
                await until(lambda: decode.calls)
                old.send_signal(signal.SIGTERM)
                await until(lambda: not listens(path))
                decode.chat = decodes
                stack.enter_context(serving(*flags))
                async with client(path) as other, other.post(CHAT, json=request(text())) as reply:
                    assert reply.status == 200
                old.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(old.wait, 100) == 0
                await asyncio.wait([asked])
            # The old process has not removed the new one's file.
            assert await asyncio.to_thread(listens, path)


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("taken", ["listening", "file", "folder"])
def test_a_used_path_is_reported_in_one_line(path: Path, taken: str, workers: str) -> None:
    with ExitStack() as stack:
        if taken == "listening":
            listener = stack.enter_context(closing(socket.socket(socket.AF_UNIX)))
            listener.bind(str(path))
            listener.listen()
        elif taken == "file":
            path.write_text("kept")
        else:
            path = path / "missing" / "s"
        ended = run("serve", *INSTANCES, "--uds", str(path), "--workers", workers)
        there = path.exists()

    assert ended.returncode == 1
    assert f"cannot listen on {path}: " in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert there is (taken != "folder")
    assert taken != "file" or path.read_text() == "kept"


def test_a_socket_with_a_full_backlog_is_not_stale(path: Path) -> None:
    with listening_at(path, 0), socket.socket(socket.AF_UNIX) as waits:
        waits.connect(str(path))
        with pytest.raises(OSError, match="another process listens"), listening_at(path, BACKLOG):
            pass
        assert path.exists()


def test_a_file_recreated_by_another_process_is_kept(path: Path) -> None:
    with listening_at(path, 1):
        path.unlink()
        stale(path)
    assert path.exists()


def test_the_mode_of_the_file_is_the_umasks(path: Path) -> None:
    before = os.umask(0o027)
    try:
        with listening_at(path, 1):
            assert path.stat().st_mode & 0o777 == 0o750
    finally:
        os.umask(before)


@pytest.mark.security("S3")
@pytest.mark.parametrize("workers", ["1", "2"])
async def test_operators_routes_answer_the_proxys_own_user_on_a_unix_socket(
    path: Path, workers: str
) -> None:
    with serving(*INSTANCES, "--uds", str(path), "--workers", workers):
        async with client(path) as http:
            for headers, status in (({}, 200), ({"Host": "epd"}, 403), ({"Via": "1.1 a"}, 403)):
                async with http.get("http://localhost/metrics", headers=headers) as reply:
                    assert reply.status == status


@pytest.mark.security("S3")
async def test_operators_routes_answer_no_other_user_on_a_unix_socket(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reverse proxy behind the socket may have clients from anywhere."""
    config = ProxyConfig(
        encode_servers_urls=("http://e:1",), decode_servers_urls=("http://d:1",), uds=path
    )
    runner = web.AppRunner(create_app(config, observers=[]))
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    own_user, statuses = os.geteuid(), []
    try:
        async with client(path) as http:
            for user in (own_user, own_user + 1):
                monkeypatch.setattr(os, "geteuid", lambda user=user: user)
                async with http.get("http://localhost/metrics") as reply:
                    statuses.append(reply.status)
    finally:
        await runner.cleanup()

    assert statuses == [200, 403]
