"""API keys, and the separation of tenants."""

import asyncio
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

import epd
from epd.tenants import key_line
from tests.requests import image, request, text
from tests.support.clients import ALICE, ALICE_2, BOB, bearer
from tests.support.fake_instance import FakeInstance, decodes, encodes
from tests.support.fleet import Fleet, Launch
from tests.support.programs import INSTANCES, called, run, serving

SECRET = "a secret of the proxies"


async def names(fleet: Fleet, key: str, **more: Any) -> tuple[str, str | None]:
    """Return the key of the same picture at the encode instance, and decode's salt."""
    status, _ = await fleet.chat(request(image(b"cat"), **more), bearer(key))
    assert status == 200
    return fleet.e.calls[-1].parts[0]["uuid"], fleet.d.calls[-1].body.get("cache_salt")


@pytest.mark.security("S11")
@pytest.mark.security("S12")
async def test_tenants_have_keys_and_salts_of_their_own(launch: Launch, keys: Path) -> None:
    async with launch(prefill=1, api_keys_file=keys) as fleet:
        alice, again, second, bob = [
            await names(fleet, key) for key in (ALICE, ALICE, ALICE_2, BOB)
        ]

        assert alice == again == second
        assert alice[0] != bob[0]
        assert alice[1] != bob[1]
        assert None not in {alice[1], bob[1]}
        for prefill, decode in zip(fleet.p.calls, fleet.d.calls, strict=True):
            assert prefill.body["cache_salt"] == decode.body["cache_salt"]
            assert prefill.parts == decode.parts


NEEDED = "a valid API key is required: Authorization: Bearer <key>"


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({}, NEEDED),
        ({"X-API-Key": ALICE}, f"{NEEDED} (X-API-Key is not accepted on this route)"),
    ],
)
async def test_a_key_in_a_wrong_header_gets_an_error_that_names_the_right_one(
    launch: Launch, keys: Path, headers: dict[str, str], told: str
) -> None:
    async with (
        launch(api_keys_file=keys) as fleet,
        fleet.http.get(f"{fleet.url}/v1/models", headers=headers) as reply,
    ):
        error = (await reply.json())["error"]

    assert (reply.status, error["message"]) == (401, told)


@pytest.mark.security("S12")
async def test_a_clients_salt_is_mixed_in_and_never_sent(launch: Launch, keys: Path) -> None:
    async with launch(api_keys_file=keys) as fleet:
        _, plain = await names(fleet, ALICE)
        salts = [
            (await names(fleet, key, cache_salt=salt))[1]
            for key, salt in ((ALICE, "mine"), (ALICE, "other"), (BOB, "mine"), (BOB, plain))
        ]

        assert len({plain, "mine", "other", *salts}) == 7
        status, reply = await fleet.chat(request(text(), cache_salt=7), bearer(ALICE))
        assert (status, reply["error"]["param"]) == (400, "cache_salt")


async def test_tenants_that_share_have_the_same_keys_and_no_salt(
    launch: Launch, keys: Path
) -> None:
    async with launch(api_keys_file=keys, isolation="shared") as fleet:
        alice, bob = await names(fleet, ALICE), await names(fleet, BOB)
        _, given = await names(fleet, ALICE, cache_salt="mine")

        assert alice == bob
        assert alice[1] is None
        assert given == "mine"


async def test_names_without_keys_equal_those_of_shared_isolation(
    launch: Launch, keys: Path
) -> None:
    async with launch(api_keys_file=keys, isolation="shared") as fleet:
        shared = await names(fleet, ALICE)
    async with launch() as fleet:
        open_to_all = await names(fleet, "anything")

    assert shared == open_to_all


async def test_keys_of_names_depend_on_the_secret(launch: Launch, keys: Path) -> None:
    async with launch(api_keys_file=keys) as fleet:
        without = await names(fleet, ALICE)
    async with launch(api_keys_file=keys, key_secret=SECRET) as fleet:
        having = await names(fleet, ALICE)
    async with launch(api_keys_file=keys, key_secret=SECRET) as replica:
        same = await names(replica, ALICE)

    assert having == same
    assert not set(having) & set(without)


WRONG = [
    {},
    bearer("wrong"),
    bearer(""),
    {"Authorization": ALICE},
    {"Authorization": f"Basic {ALICE}"},
    bearer(f"{ALICE} {BOB}"),
    bearer("sk-\u00fc"),
    {"Authorization": "Bearer"},
    {"x-api-key": ALICE},
    bearer(ALICE + "x"),
    bearer(ALICE[:-1]),
]


@pytest.mark.security("S1")
@pytest.mark.parametrize("headers", WRONG)
async def test_a_request_without_a_key_reaches_no_instance(
    launch: Launch, keys: Path, headers: dict[str, str]
) -> None:
    async with launch(api_keys_file=keys) as fleet:
        async with fleet.post(request(image()), headers) as reply:
            error = (await reply.json())["error"]

        assert (reply.status, error["code"]) == (401, 401)
        assert set(error) == {"message", "type", "param", "code"}
        assert reply.headers["x-epd-error"] == "invalid_api_key"
        assert reply.headers["WWW-Authenticate"] == "Bearer"
        assert fleet.e.calls == fleet.d.calls == []
        assert [event.error for event in fleet.events.requests] == ["invalid_api_key"]


@pytest.mark.security("S1")
async def test_two_keys_are_none(launch: Launch, keys: Path) -> None:
    async with launch(api_keys_file=keys) as fleet:
        two = [("Authorization", f"Bearer {key}") for key in (ALICE, BOB)]
        url = f"{fleet.url}/v1/chat/completions"
        async with fleet.http.post(url, headers=two, json=request(text())) as reply:
            assert reply.status == 401


@pytest.mark.security("S1")
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/v1/models", 401),
        ("GET", "/v1/chat/completions", 401),
        ("GET", "/v1/nothing", 401),
        ("GET", "//v1/models", 401),
        ("GET", "/%76%31/models", 401),
        ("GET", "/nothing", 401),
        ("DELETE", "/v1/media/cat", 401),
        ("GET", "/start_profile", 401),
    ],
)
async def test_health_is_the_only_route_without_a_key(
    launch: Launch, keys: Path, method: str, path: str, status: int
) -> None:
    async with launch(api_keys_file=keys) as fleet:
        async with fleet.http.request(method, fleet.url + path) as reply:
            assert reply.status == status
        if status == 401:
            assert fleet.d.other_calls == []
            async with fleet.http.request(method, fleet.url + path, headers=bearer(ALICE)) as reply:
                assert reply.status in {200, 404, 405, 503}


async def test_a_mounted_proxy_requires_keys(launch: Launch, keys: Path) -> None:
    async with launch() as fleet:
        config = epd.ProxyConfig(
            encode_servers_urls=(fleet.e.url,),
            decode_servers_urls=(fleet.d.url,),
            api_keys_file=keys,
        )
        outer = web.Application()
        outer.add_subapp("/epd", epd.create_app(config, observers=[]))
        async with TestClient(TestServer(outer)) as client:
            for headers, status in (({}, 401), (bearer(ALICE), 200)):
                async with client.get("/epd/v1/models", headers=headers) as reply:
                    assert reply.status == status
            async with client.get("/epd/health") as reply:
                assert reply.status == 200


@pytest.mark.parametrize(
    ("key", "first"),
    [("wrong", b"HTTP/1.1 401 Unauthorized"), (ALICE, b"HTTP/1.1 100 Continue")],
)
async def test_a_body_is_read_only_with_a_valid_key(
    launch: Launch, keys: Path, key: str, first: bytes
) -> None:
    """The client sends no byte of the body, so an early answer has not waited for it."""
    async with launch(api_keys_file=keys) as fleet:
        host, port = fleet.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with closing(writer):
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: epd\r\nContent-Length: 99999\r\n"
                b"Expect: 100-continue\r\nAuthorization: Bearer " + key.encode() + b"\r\n\r\n"
            )
            line = await asyncio.wait_for(reader.readline(), 20)

        assert line.strip() == first


@pytest.mark.security("S2")
@pytest.mark.parametrize("own", [None, "own-key"])
async def test_a_clients_key_reaches_no_instance(
    launch: Launch, keys: Path, own: str | None
) -> None:
    async with launch(prefill=1, api_keys_file=keys, openai_api_key=own) as fleet:
        await fleet.chat(request(image()), bearer(ALICE))

        for instance in (fleet.e, fleet.p, fleet.d):
            [call] = instance.calls
            assert call.headers.get("Authorization") == (own and f"Bearer {own}")
            assert ALICE not in f"{call}"


@pytest.mark.security("S19")
async def test_no_key_is_logged(keys: Path) -> None:
    encode, decode = FakeInstance(encodes), FakeInstance(decodes)
    async with encode.running(), decode.running():
        flags = ["--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url]
        flags += ["--api-keys-file", str(keys), "--log-level", "debug"]
        env = {"EPD_KEY_SECRET": SECRET}
        with serving(*flags, env=env) as (url, process):
            async with openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key=ALICE, max_retries=0
            ) as client:
                messages: Any = request(image())["messages"]
                await client.chat.completions.create(model="m", messages=messages)
                with pytest.raises(openai.AuthenticationError):
                    await client.with_options(api_key="sk-wrong").models.list()
            process.terminate()
            assert process.stderr is not None
            logged = process.stderr.read()

    assert '"invalid_api_key"' in logged
    for secret in (ALICE, "sk-wrong", SECRET, encode.calls[0].parts[0]["uuid"]):
        assert secret not in logged


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("# ours\n\nalice:sk-key-itself\n", "line 3 is not tenant:sha256"),
        ("", "the file has no key"),
        (None, "No such file"),
    ],
)
def test_a_keys_file_that_cannot_be_used_ends_the_start_in_one_line(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    ended = called("serve", *INSTANCES, "--api-keys-file", str(path))

    assert ended.returncode == 2
    assert f"--api-keys-file {path}: {message}" in ended.stderr.splitlines()[-1]
    assert "sk-key" not in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_keys_file_that_others_may_read_is_warned_of(keys: Path, mode: int, warns: bool) -> None:
    keys.chmod(mode)
    with socket.create_server(("127.0.0.1", 0)) as taken:  # makes the proxy exit
        port = str(taken.getsockname()[1])
        ended = run(
            "serve", *INSTANCES, "--host", "127.0.0.1", "--port", port, "--api-keys-file", str(keys)
        )

    assert ("others may read" in ended.stderr) == warns


async def test_a_new_key_opens_the_proxy_that_has_its_line(launch: Launch, tmp_path: Path) -> None:
    made = await asyncio.to_thread(run, "hash-key", "carol")
    key = made.stderr.strip()
    path = tmp_path / "keys"
    path.write_text(made.stdout)
    path.chmod(0o600)

    assert made.returncode == 0
    assert key not in made.stdout
    async with launch(api_keys_file=path) as fleet:
        status, _ = await fleet.chat(request(text()), bearer(key))
        assert status == 200


def test_a_key_from_stdin_is_hashed_and_not_shown() -> None:
    made = called("hash-key", "alice", "--stdin", stdin=ALICE + "\n")

    assert made.stdout == key_line("alice", ALICE) + "\n"
    assert made.stderr == ""


@pytest.mark.parametrize(
    ("args", "stdin"), [(["al:ice"], ""), (["alice", "--stdin"], "short\n"), ([], "")]
)
def test_a_line_that_cannot_be_made_ends_in_one_line(args: list[str], stdin: str) -> None:
    ended = called("hash-key", *args, stdin=stdin)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
