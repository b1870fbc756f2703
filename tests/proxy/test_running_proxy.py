"""`epd check --url` and `epd doctor --url`: what a running proxy tells its operator."""

import asyncio
import json
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import orjson
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from epd.config import ProxyConfig
from epd.config.load import load_running
from epd.config.shown import public_settings
from epd.running_proxy import NoAnswer, find_proxy, fleet_folder
from tests.support.fake_instance import FakeInstance, decodes, encodes
from tests.support.fleet import Launch
from tests.support.own_sockets import use_own_sockets
from tests.support.programs import INSTANCES, called

ADMIN = "admin-SECRET-0123456789"
KEY_SECRET = "SECRET-of-the-store-keys"
STORE = "redis://:SECRETword@127.0.0.1:1/0"


async def epd(*words: str, **env: str) -> CompletedProcess[str]:
    return await asyncio.to_thread(called, *words, env=env)


def config(**settings: Any) -> ProxyConfig:
    urls = {"encode_servers_urls": ("http://e:1",), "decode_servers_urls": ("http://d:1",)}
    return ProxyConfig(**urls | settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ec_store": "file:///ec?max_bytes=1GiB", "encode_timeout_s": 7.5, "workers": 2},
        {"media_fetch": "proxy", "allowed_media_domains": ("a.example", "b.example")},
        {"allowed_origins": ("*",), "instance_weights": ("http://e:1=0.5",), "root_path": "/vllm"},
        {"decode_balance": "content", "kv_events": True, "kv_events_addrs": ("tcp://*:5557",)},
        {"encode_below_pixels": 100_000, "allowed_local_media_path": Path("/media")},
        {"uds": Path("/run/epd.sock"), "api_keys_file": Path("/keys"), "tenant_max_requests": 4},
    ],
)
def test_the_shown_settings_are_those_of_the_proxy(settings: dict[str, Any]) -> None:
    proxy = config(**settings)
    shown, hidden = public_settings(proxy)

    found = load_running({}, "http://p", orjson.loads(orjson.dumps(shown)), hidden)

    assert hidden == []
    assert found.config == proxy
    assert {setting.where for setting in found.settings.values()} == {"http://p"}


def test_hidden_settings_come_from_the_environment_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown, hidden = public_settings(config(ec_store=STORE, key_secret=KEY_SECRET))
    monkeypatch.setenv("EPD_EC_STORE", STORE)
    monkeypatch.setenv("EPD_MAX_ITEMS", "3")
    monkeypatch.setenv("OPENAI_API_KEY", "the client's, and not the proxy's")

    found = load_running({"port": "1"}, "http://p", shown, hidden).config

    assert sorted(hidden) == ["ec_store", "key_secret"]
    assert "SECRET" not in str(shown)
    assert (found.ec_store, found.port, found.max_items) == (STORE, 1, config().max_items)
    assert found.key_secret is not None
    assert found.openai_api_key is None


@pytest.mark.security("S3")
async def test_check_shows_the_settings_of_a_running_proxy_without_secrets(launch: Launch) -> None:
    settings: dict[str, Any] = {"ec_store": STORE, "key_secret": KEY_SECRET, "admin_api_key": ADMIN}
    async with launch(**settings) as fleet:
        shown = await epd("check", "--url", fleet.url, "--max-items", "3", EPD_ADMIN_API_KEY=ADMIN)
        refused = await epd("check", "--url", fleet.url)
        async with fleet.http.get(f"{fleet.url}/settings", headers={"X-API-Key": ADMIN}) as reply:
            page = await reply.json()

    assert shown.returncode == 0
    lines = shown.stdout.splitlines()
    assert f'encode_servers_urls: ["{fleet.e.url}"]  # proxy {fleet.url}' in lines
    assert f'# ec_store: "redis://:***@127.0.0.1:1/0"  # proxy {fleet.url}' in lines
    assert "max_items: 3  # flag --max-items" in lines
    assert yaml.safe_load(shown.stdout)["decode_servers_urls"] == [fleet.d.url]
    assert sorted(page["hidden"]) == ["admin_api_key", "ec_store", "key_secret"]
    assert "SECRET" not in shown.stdout + str(page)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "the admin key is required" in refused.stderr


async def test_the_doctor_examines_the_registered_instances_of_a_running_proxy(
    launch: Launch, tmp_path: Path
) -> None:
    store = f"file://{tmp_path}/store"
    settings: dict[str, Any] = {
        "dynamic_registration": True,
        "admin_api_key": ADMIN,
        "ec_store": store,
    }
    async with launch(**settings) as fleet, FakeInstance(encodes).running() as late:
        body = {"role": "encode", "url": late.url}
        headers = {"X-API-Key": ADMIN}
        async with fleet.http.post(f"{fleet.url}/instances", json=body, headers=headers) as reply:
            assert reply.status == 200
        words = ("doctor", "--url", fleet.url, "--format", "json")
        examined = json.loads((await epd(*words, EPD_ADMIN_API_KEY=ADMIN)).stdout)

    subjects = {finding["subject"] for finding in examined["findings"]}
    assert {f"encode {url}" for url in (fleet.e.url, late.url)} < subjects
    assert f"prefill_decode {fleet.d.url}" in subjects
    assert "registration" not in subjects
    assert len(late.calls) == 1


async def test_the_doctor_asks_for_the_password_that_the_proxy_hides(launch: Launch) -> None:
    async with launch(ec_store=STORE) as fleet:
        examined = await epd("doctor", "--url", fleet.url)

    assert (examined.returncode, examined.stdout) == (2, "")
    assert "does not show the password of its store: set EPD_EC_STORE" in examined.stderr


@contextmanager
def fleets(*ports: int) -> Iterator[None]:
    """Listen where the stores of fleets with these ports listen."""
    with ExitStack() as stack:
        for port in ports:
            folder = fleet_folder(port)
            folder.mkdir(mode=0o700, parents=True)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(folder / "arena.sock"))
            listener.listen()
        yield


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process see only the sockets that the test makes, in a folder with a short path."""
    with tempfile.TemporaryDirectory() as folder:
        use_own_sockets(Path(folder), monkeypatch)
        yield


@pytest.mark.usefixtures("sockets")
async def test_commands_without_arguments_find_the_only_fleet_of_this_host(launch: Launch) -> None:
    async with launch() as fleet:
        port = int(fleet.url.rpartition(":")[2])
        with fleets(port):
            checked, watched = await epd("check"), await epd("top", "--once")
            given = await epd("check", *INSTANCES)
            named = await epd("check", EPD_DECODE_SERVERS_URLS="http://d:1")

    assert f'decode_servers_urls: ["{fleet.d.url}"]  # proxy {fleet.url}' in checked.stdout
    assert "1e1pd" in watched.stdout
    assert 'decode_servers_urls: ["http://d:1"]  # flag --decode-servers-urls' in given.stdout
    assert "--encode-servers-urls is required" in named.stderr


@pytest.mark.usefixtures("sockets")
def test_the_proxy_has_the_default_port_without_a_fleet_and_is_named_with_two() -> None:
    assert find_proxy() == "http://127.0.0.1:8000"
    with fleets(8000, 8010), pytest.raises(NoAnswer, match=r"several .* http://127.0.0.1:8010"):
        find_proxy()


@pytest.mark.parametrize("command", ["check", "doctor", "top"])
async def test_a_command_says_what_to_do_if_no_proxy_answers(command: str) -> None:
    ended = await epd(command, "--url", "http://127.0.0.1:1")

    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        f"epd {command}: http://127.0.0.1:1 does not answer: Connection refused. Is the proxy "
        "running there? --url names another\n"
    )


async def test_check_tells_another_server_from_another_version() -> None:
    page: dict[str, Any] = {
        "version": "9.9",
        "settings": {"new_setting": 1},
        "hidden": [],
        "instances": [],
    }

    async def settings(_: web.Request) -> web.Response:
        return web.json_response(page)

    app = web.Application()
    app.router.add_get("/settings", settings)
    async with TestServer(app) as newer, FakeInstance(decodes).running() as engine:
        of_engine = await epd("check", "--url", engine.url)
        of_newer = await epd("check", "--url", f"http://127.0.0.1:{newer.port}")
        page["instances"] = [{"role": "encode", "url": "nonsense"}]
        page["settings"] = config().model_dump(mode="json", exclude_unset=True)
        broken = await epd("check", "--url", f"http://127.0.0.1:{newer.port}")

    assert "it is not an EPD proxy of this version" in of_engine.stderr
    assert "warning: " in of_newer.stderr
    assert "has version 9.9" in of_newer.stderr
    assert "is required" in of_newer.stderr
    assert broken.returncode == 2
    assert "nonsense" in broken.stderr
