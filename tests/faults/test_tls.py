"""TLS with real certificates, processes and handshakes."""

import asyncio
import select
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from pydantic import ValidationError

import epd
from epd.edge.listening import server_context
from epd.edge.protocol import MAX_REFUSALS
from epd.http import tls
from epd.http.tls import TlsInvalid, upstream_context
from tests.certificates import Authority, Certificate, encrypted
from tests.requests import request, text
from tests.support.fake_instance import FakeInstance, decodes, encodes
from tests.support.programs import INSTANCES, run, serving
from tests.support.raw import connected, ended

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")

WAIT_S = 60


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.made(tmp_path)


@pytest.fixture
def issued(authority: Authority) -> Certificate:
    return authority.issue()


@dataclass
class Clients:
    """Clients of a proxy that serves `https://localhost`."""

    port: int
    trust: ssl.SSLContext

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    async def status(self, path: str = "/openapi.json", trust: ssl.SSLContext | None = None) -> int:
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self.url}{path}", ssl=trust or self.trust) as reply,
        ):
            return reply.status


def config(**fields: Any) -> epd.ProxyConfig:
    urls = {"encode_servers_urls": "http://e:1", "decode_servers_urls": "http://d:1"}
    return epd.ProxyConfig(**urls | fields)


def trusts(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.ca)


def of(url: str, authority: Authority) -> Clients:
    return Clients(int(url.rpartition(":")[2]), trusts(authority))


@asynccontextmanager
async def instances(context: ssl.SSLContext | None = None) -> AsyncIterator[list[FakeInstance]]:
    encode, decode = FakeInstance(encodes), FakeInstance(decodes)
    async with encode.running(), decode.running(context):
        yield [encode, decode]


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_the_openai_client_is_served(
    authority: Authority, issued: Certificate, workers: str
) -> None:
    async with instances() as (encode, decode):
        flags = ["--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url]
        with serving(*flags, *issued.flags, "--workers", workers) as (url, process):
            assert url.startswith("https://127.0.0.1:")
            clients = of(url, authority)
            async with openai.AsyncOpenAI(
                base_url=f"{clients.url}/v1",
                api_key="k",
                max_retries=0,
                timeout=WAIT_S,
                http_client=openai.DefaultAsyncHttpxClient(verify=clients.trust),
            ) as client:
                chat = client.chat.completions
                whole = await chat.create(model="m", messages=[{"role": "user", "content": "a"}])
                stream = await chat.create(
                    model="m", messages=[{"role": "user", "content": "a"}], stream=True
                )
                chunks = [chunk.choices[0].delta.content async for chunk in stream]
            process.terminate()
            assert await asyncio.to_thread(process.wait, WAIT_S) == 0

    assert whole.choices[0].message.content == "aé"
    assert chunks == ["a", "é"]


def test_tls_below_1_2_is_refused(issued: Certificate) -> None:
    context = server_context(config(ssl_certfile=issued.chain, ssl_keyfile=issued.key))

    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("required", [True, False])
async def test_clients_certificates_are_verified(
    tmp_path: Path, authority: Authority, issued: Certificate, required: bool
) -> None:
    """As vLLM's `--ssl-cert-reqs`: 2 requires a certificate, 1 verifies one if it is sent."""
    reqs = ["--ssl-ca-certs", str(authority.ca), "--ssl-cert-reqs", "2" if required else "1"]
    ours, foreign = authority.issue(name="ours"), Authority.made(tmp_path, "other").issue(name="x")
    with serving(*INSTANCES, *issued.flags, *reqs) as (url, _):
        clients = of(url, authority)
        known, unknown = trusts(authority), trusts(authority)
        known.load_cert_chain(ours.chain, ours.key)
        unknown.load_cert_chain(foreign.chain, foreign.key)

        assert await clients.status(trust=known) == 200
        with pytest.raises(aiohttp.ClientError):
            await clients.status(trust=unknown)
        if required:
            with pytest.raises(aiohttp.ClientError):
                await clients.status()
        else:
            assert await clients.status() == 200


async def test_a_client_without_tls_does_no_harm(authority: Authority, issued: Certificate) -> None:
    said = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-SECRET\r\n\r\n"
    with serving(*INSTANCES, *issued.flags) as (url, process):
        clients = of(url, authority)
        silent = [socket.create_connection(("127.0.0.1", clients.port)) for _ in range(50)]
        for connection in silent[:25]:
            connection.sendall(b"\x16\x03\x01\x02\x00\x01")  # the start of a ClientHello
        with socket.create_connection(("127.0.0.1", clients.port), WAIT_S) as plain:
            plain.sendall(said)
            answer = await asyncio.to_thread(plain.recv, 4096)

        async with asyncio.timeout(WAIT_S):
            assert await clients.status() == 200
        process.terminate()
        assert await asyncio.to_thread(process.wait, WAIT_S) == 0
        for connection in silent:
            connection.close()
        assert process.stderr is not None
        logged = process.stderr.read()

    assert not answer.startswith(b"HTTP")
    assert "SECRET" not in logged
    assert "Traceback" not in logged


@pytest.mark.fault(47)
@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_handshake_that_does_not_end_is_given_up(issued: Certificate, workers: str) -> None:
    flags = [*issued.flags, "--header-timeout-s", "0.5", "--workers", workers]
    with serving(*INSTANCES, *flags) as (url, _):
        for said in (b"", b"\x16\x03\x01\x02\x00\x01"):  # nothing, or a part of a ClientHello
            async with connected(url) as (reader, writer):
                writer.write(said)

                assert await ended(reader)


@pytest.mark.fault(58)
@pytest.mark.parametrize("workers", ["1", "2"])
async def test_handshakes_are_counted_among_the_connections(
    authority: Authority, issued: Certificate, workers: str
) -> None:
    """Excess connections are closed at once, and hold no descriptors."""
    flags = [*issued.flags, "--header-timeout-s", "6", "--workers", workers]
    with serving(*INSTANCES, *flags, "--max-connections", "1") as (url, _), ExitStack() as stack:
        clients = of(url, authority)
        async with asyncio.timeout(WAIT_S):
            while not await served(clients):  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(0.1)
        address = ("127.0.0.1", clients.port)
        held = int(workers) * (1 + MAX_REFUSALS)
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(3 * held)]
        async with asyncio.timeout(5):  # before the handshakes of the others time out
            while len(select.select(silent, [], [], 0)[0]) < len(silent) - held:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        async with asyncio.timeout(WAIT_S):
            while not await served(clients):  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(0.1)


async def served(clients: Clients) -> bool:
    try:
        return await clients.status("/openapi.json") == 200
    except aiohttp.ClientError:
        return False


def test_files_that_cannot_be_used_are_named(
    tmp_path: Path, authority: Authority, issued: Certificate
) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_text("no PEM\n")
    pair: dict[str, Any] = {"ssl_certfile": issued.chain, "ssl_keyfile": issued.key}
    other, locked = authority.issue(name="other").key, encrypted(issued.key)
    wrong: list[tuple[dict[str, Any], str]] = [
        (pair | {"ssl_certfile": tmp_path / "none"}, "--ssl-certfile .*none: No such file"),
        (pair | {"ssl_keyfile": garbage}, "--ssl-keyfile .*garbage"),
        (pair | {"ssl_keyfile": other}, "--ssl-keyfile .*: key values mismatch"),
        (pair | {"ssl_keyfile": locked}, "--ssl-keyfile .*passphrase"),
        (pair | {"ssl_ca_certs": garbage, "ssl_cert_reqs": 2}, "--ssl-ca-certs .*garbage"),
    ]
    for fields, message in wrong:
        with pytest.raises(TlsInvalid, match=message):
            server_context(config(**fields))
    for ca_file in (tmp_path / "none", garbage):
        with pytest.raises(TlsInvalid, match=f"--upstream-ca-file {ca_file}: "):
            upstream_context(ca_file)


@pytest.mark.parametrize("gone", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs"])
def test_a_certificate_file_removed_during_the_check_is_rejected(
    tmp_path: Path,
    authority: Authority,
    issued: Certificate,
    monkeypatch: pytest.MonkeyPatch,
    gone: str,
) -> None:
    """Any exception but TlsInvalid would end the reloading for good."""
    monkeypatch.setattr(tls, "_readable", lambda flag, path: None)
    files: dict[str, Any] = {
        "ssl_certfile": issued.chain,
        "ssl_keyfile": issued.key,
        "ssl_ca_certs": authority.ca,
    }
    with pytest.raises(TlsInvalid, match="No such file"):
        server_context(config(**files | {gone: tmp_path / "none"}, ssl_cert_reqs=2))


def test_flags_that_need_each_other_are_rejected_separately() -> None:
    pair, ca = {"ssl_certfile": "c", "ssl_keyfile": "k"}, {"ssl_ca_certs": "ca"}
    wrong: list[dict[str, Any]] = [
        {"ssl_certfile": "c"},
        {"ssl_keyfile": "k"},
        pair | ca,
        pair | {"ssl_cert_reqs": 2},
        ca | {"ssl_cert_reqs": 2},
    ]
    for fields in wrong:
        with pytest.raises(ValidationError, match="need"):
            config(**fields)


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("flag", ["--ssl-keyfile", "--upstream-ca-file"])
def test_a_file_that_cannot_be_used_ends_in_one_line(
    tmp_path: Path, issued: Certificate, workers: str, flag: str
) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_text("no PEM\n")
    ended = run("serve", *INSTANCES, *issued.flags, flag, str(garbage), "--workers", workers)

    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert f"{flag} {garbage}" in ended.stderr


@pytest.mark.parametrize("case", ["trusted", "another CA", "another name", "no CA named"])
async def test_instances_are_verified_by_ca_and_name(
    tmp_path: Path, authority: Authority, case: str
) -> None:
    served = authority.issue("elsewhere" if case == "another name" else "localhost")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(served.chain, served.key)
    ca = Authority.made(tmp_path, "other") if case == "another CA" else authority
    trust = [] if case == "no CA named" else ["--upstream-ca-file", str(ca.ca)]
    async with instances(context) as (encode, decode):
        named = decode.url.replace("127.0.0.1", "localhost")
        flags = ["--encode-servers-urls", encode.url, "--decode-servers-urls", named]
        env = {"OPENAI_API_KEY": "sk-SECRET"}
        with serving(*flags, *trust, env=env) as (url, process):
            chat = f"{url}/v1/chat/completions"
            async with (
                aiohttp.ClientSession() as http,
                http.post(chat, json=request(text())) as reply,
            ):
                said = reply.status, reply.headers.get("x-epd-error")
                body = await reply.text()
            process.terminate()
            assert process.stderr is not None
            logged = process.stderr.read()

    assert said == ((200, None) if case == "trusted" else (502, "decode_failed"))
    assert len(decode.calls) == (case == "trusted")
    assert "SECRET" not in logged
    assert "certificate" not in body.lower()
    assert ("CERTIFICATE_VERIFY_FAILED" in logged) == (case != "trusted")
