"""Path prefix of a reverse proxy, which removes or keeps it."""

from typing import Any

import orjson
import pytest

import epd
from epd.server.app import openapi_document
from tests.requests import request, text
from tests.security.wire import ask
from tests.support.fleet import Launch

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("prefix", ["/vllm", "/a/b-c/"])
async def test_every_route_is_answered_with_the_prefix_and_without_it(
    launch: Launch, prefix: str
) -> None:
    async with launch(root_path=prefix) as fleet:
        under = prefix.rstrip("/")
        for path in (CHAT, under + CHAT):
            async with fleet.http.post(fleet.url + path, json=request(text())) as reply:
                assert reply.status == 200
        for path in ("/v1/models?a=b", "/instances", "/ui", "/ui/app.js", "/ui/state"):
            async with fleet.http.get(fleet.url + under + path) as reply:
                assert reply.status == 200

        assert [call.path for call in fleet.d.calls] == [CHAT, CHAT]
        assert {event.path for event in fleet.events.requests} >= {CHAT, "/v1/models"}


@pytest.mark.parametrize(
    "target",
    [
        "/vllmx/v1/models",
        "/vllmv1/models",
        "/vllm/vllm/v1/models",
        "/VLLM/v1/models",
        "/vllm//v1/models",
        "/%76llm/v1/models",
        "/x/vllm/v1/models",
    ],
)
async def test_a_path_outside_the_prefix_is_not_a_route(launch: Launch, target: str) -> None:
    async with launch(root_path="/vllm") as fleet:
        answer = await ask(fleet.url, f"GET {target} HTTP/1.1")

        assert (answer.status, answer.headers["x-epd-error"]) == (404, "unknown_route")


@pytest.mark.parametrize("target", ["/vllm", "/vllm/", "/"])
async def test_the_root_leads_to_the_page_below_the_prefix(launch: Launch, target: str) -> None:
    async with launch(root_path="/vllm") as fleet:
        answer = await ask(fleet.url, f"GET {target} HTTP/1.1")

        assert (answer.status, answer.headers["Location"]) == (302, "/vllm/ui")


async def test_an_unconfigured_prefix_is_not_a_route(launch: Launch) -> None:
    async with launch() as fleet:
        assert (await ask(fleet.url, "GET /vllm/v1/models HTTP/1.1")).status == 404


async def test_a_target_that_names_its_host_may_have_the_prefix(launch: Launch) -> None:
    async with launch(root_path="/vllm") as fleet:
        there = await ask(fleet.url, f"GET {fleet.url}/vllm/v1/models HTTP/1.1")
        elsewhere = await ask(fleet.url, "GET http://other/vllm/v1/models HTTP/1.1")

    assert (there.status, elsewhere.status) == (200, 400)


@pytest.mark.security("S3")
async def test_the_prefix_opens_no_operators_route(launch: Launch, keys: Any) -> None:
    async with launch(root_path="/vllm", api_keys_file=keys, admin_api_key="k" * 16) as fleet:
        for path in ("/metrics", "/v1/models", "/ui/state"):
            assert (await ask(fleet.url, f"GET /vllm{path} HTTP/1.1")).status == 401


async def test_the_document_contains_the_prefix(launch: Launch) -> None:
    line = "GET /openapi.json HTTP/1.1"
    async with launch(root_path="/vllm") as under, launch() as fleet:
        document = orjson.loads((await ask(under.url, line)).body)
        plain = await ask(fleet.url, line)

    assert document["servers"] == [{"url": "/vllm"}]
    assert plain.body == openapi_document()


@pytest.mark.parametrize("path", ["vllm", "/a//b", "/a?b", "/a b", "/..", "/a/./b", "http://a/b"])
def test_a_prefix_is_a_path_of_one_spelling(path: str) -> None:
    urls = {"encode_servers_urls": "http://e:1", "decode_servers_urls": "http://d:1"}
    with pytest.raises(ValueError, match="is not a path such as"):
        epd.ProxyConfig.model_validate(urls | {"root_path": path})
