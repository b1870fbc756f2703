"""vLLM's headers between clients and instances, and request priorities."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

import epd
from epd.edge.engine_headers import passed_back, priority_of, sent_on
from tests.requests import image, request, text
from tests.support.clients import ALICE, BOB, bearer
from tests.support.fake_instance import REPLY, Call
from tests.support.fleet import Fleet, Launch

LOAD = "JSON " + '{"named_metrics": {"kv_cache_usage_perc": 0.4}}'
ASKS = {
    "X-Session-ID": "conversation 1",
    "X-Vllm-Priority": "-3",
    "endpoint-load-metrics-format": "JSON",
}


def given(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


async def loaded(asked: web.Request, _: dict[str, Any]) -> web.Response:
    """Report the load in a header if the client asked for it, as vLLM does."""
    wanted = "endpoint-load-metrics-format" in asked.headers
    headers = {"endpoint-load-metrics": LOAD} if wanted else {}
    return web.json_response(REPLY, headers=headers)


def carried(calls: Iterable[Call]) -> list[dict[str, str]]:
    names = {name.lower() for name in ASKS}
    return [
        {name.lower(): value for name, value in call.headers.items() if name.lower() in names}
        for call in calls
    ]


async def ask(fleet: Fleet, path: str, body: dict[str, Any], headers: dict[str, str]) -> str | None:
    async with fleet.http.post(fleet.url + path, json=body, headers=headers) as reply:
        assert reply.status == 200
        return reply.headers.get("endpoint-load-metrics")


async def test_session_and_load_format_reach_the_instances(launch: Launch) -> None:
    async with launch(prefill=1) as fleet:
        fleet.d.chat = loaded
        told = await ask(fleet, "/v1/chat/completions", request(image(), priority=7), ASKS)

        for instance in (fleet.e, fleet.p, fleet.d):
            [got] = carried(instance.calls)
            assert got == {
                "x-session-id": "conversation 1",
                "endpoint-load-metrics-format": "JSON",
            }
        assert told == LOAD


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("priority", [-3, 0])
async def test_the_headers_priority_becomes_the_field(
    launch: Launch, path: str, priority: int
) -> None:
    async with launch(prefill=1) as fleet:
        body = request(image(), priority=7) | {"prompt": "hi", "input": "hi"}
        await ask(fleet, path, body, {"X-Vllm-Priority": str(priority)})

        assert all("priority" not in call.body for call in fleet.e.calls)
        assert fleet.p.calls[0].body["priority"] == fleet.d.calls[0].body["priority"] == priority


async def test_a_message_has_its_priority_in_the_header(launch: Launch) -> None:
    """Anthropic's requests have no such field. Encode requests have no priority."""
    source = {"type": "base64", "media_type": "image/png", "data": "cGljdHVyZQ=="}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "hi"}]
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    async with launch() as fleet:
        await ask(fleet, "/v1/messages", body, {"X-Vllm-Priority": "2"})

        assert fleet.d.calls[0].headers["X-Vllm-Priority"] == "2"
        assert ["X-Vllm-Priority" in call.headers for call in fleet.e.calls] == [False]


@pytest.mark.security("S24")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings"])
async def test_priorities_and_loads_are_for_trusted_tenants_only(
    launch: Launch, keys: Path, path: str
) -> None:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], "priority": 7}
    async with launch(prefill=1, api_keys_file=keys, trusted_tenants=("alice",)) as fleet:
        fleet.d.chat = loaded
        told = [await ask(fleet, path, body, ASKS | bearer(key)) for key in (BOB, ALICE)]

        assert told == [None, LOAD]
        for calls in filter(None, (fleet.p.calls, fleet.d.calls)):
            theirs, trusted = calls
            assert "priority" not in theirs.body
            assert carried([theirs]) == [{"x-session-id": "conversation 1"}]
            assert "priority" in trusted.body or "x-vllm-priority" in carried([trusted])[0]


def test_trusted_tenants_need_keys() -> None:
    urls = {"encode_servers_urls": "http://e:1", "decode_servers_urls": "http://d:1"}
    with pytest.raises(ValueError, match="--trusted-tenants needs --api-keys-file"):
        epd.ProxyConfig.model_validate(urls | {"trusted_tenants": "alice"})
    with pytest.raises(ValueError, match="is not the name of a tenant"):
        epd.ProxyConfig.model_validate(urls | {"trusted_tenants": "alice,b b"})


@pytest.mark.parametrize(
    ("said", "priority"),
    [
        (["5"], 5),
        (["-9223372036854775808"], -(2**63)),
        (["9223372036854775808"], None),
        (["9" * 4000], None),
        (["high"], None),
        (["1.5"], None),
        (["\u0661"], None),
        ([""], None),
        (["1", "2"], None),
        ([], None),
    ],
)
def test_a_priority_is_one_integer_of_64_bits(said: list[str], priority: int | None) -> None:
    headers = given(*(("x-vllm-priority", one) for one in said))

    assert priority_of(headers) == priority


@pytest.mark.security("S5")
@pytest.mark.parametrize(
    "headers",
    [
        given(("X-Session-ID", "a"), ("X-Session-ID", "b")),
        given(("X-Session-ID", "a\x7f")),
        given(("X-Session-ID", "ä")),
        given(("X-Session-ID", "a" * 5000)),
        given(("endpoint-load-metrics-format", "xml")),
        given(("endpoint-load-metrics", LOAD)),
    ],
)
def test_header_values_that_vllm_rejects_are_not_sent(headers: CIMultiDictProxy[str]) -> None:
    assert sent_on(headers, trusted=True) == {}


@pytest.mark.parametrize("load", ["a\x00b", "ä", ""])
async def test_a_load_header_that_is_not_text_is_not_forwarded(load: str) -> None:
    assert passed_back({"endpoint-load-metrics": load}) == {}


async def test_a_stream_has_the_load_that_its_head_brings(launch: Launch) -> None:
    async def streams(asked: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream", "endpoint-load-metrics": LOAD}
        response = web.StreamResponse(headers=headers)
        await response.prepare(asked)
        await response.write(b"data: [DONE]\n\n")
        return response

    async with launch() as fleet:
        fleet.d.chat = streams
        body = request(text(), stream=True)
        assert await ask(fleet, "/v1/chat/completions", body, {}) == LOAD
