"""API keys and tenants at the endpoints other than chat."""

from pathlib import Path

import pytest

from epd.api.endpoints import ENDPOINTS
from tests.proxy.endpoints import PLAIN, SALTED, anthropic, ask, message
from tests.requests import text
from tests.support.clients import ALICE, BOB, bearer
from tests.support.fleet import Fleet, Launch


@pytest.mark.security("S1")
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_no_endpoint_answers_without_a_key(launch: Launch, keys: Path, path: str) -> None:
    async with launch(api_keys_file=keys) as fleet:
        for headers in ({}, bearer("wrong"), {"X-API-Key": "wrong"}):
            status, _ = await ask(fleet, path, PLAIN.get(path, {}), headers)
            assert status == 401
        assert fleet.d.calls == []


@pytest.mark.security("S12")
@pytest.mark.parametrize("path", SALTED)
async def test_salts_differ_between_tenants(launch: Launch, keys: Path, path: str) -> None:
    async with launch(api_keys_file=keys) as fleet:
        for key in (ALICE, BOB, ALICE):
            assert (await ask(fleet, path, PLAIN[path], bearer(key)))[0] == 200

        first, second, third = (call.body["cache_salt"] for call in fleet.d.calls)
        assert first == third != second


@pytest.mark.security("S1")
async def test_anthropics_clients_send_their_key_in_x_api_key(launch: Launch, keys: Path) -> None:
    async with launch(api_keys_file=keys) as fleet:
        asked = message(text())
        async with anthropic().AsyncAnthropic(base_url=fleet.url, api_key=ALICE) as client:
            assert (await client.messages.create(**asked)).id == "msg"
        both = {"X-API-Key": ALICE, **bearer("wrong")}
        assert (await ask(fleet, "/v1/messages", asked, both))[0] == 401
        assert {"x-api-key", "authorization"}.isdisjoint(
            name.lower() for name in fleet.d.calls[0].headers
        )


async def test_a_401_names_the_header_of_the_key(launch: Launch, keys: Path) -> None:
    async with launch(api_keys_file=keys) as fleet:
        _, chats = await ask(fleet, "/v1/chat/completions", PLAIN["/v1/chat/completions"])
        _, messages = await ask(fleet, "/v1/messages", PLAIN["/v1/messages"])

    assert chats["error"]["message"].endswith("Authorization: Bearer <key>")
    assert messages["error"]["message"].endswith("X-API-Key: <key>")


async def test_instances_check_anthropic_keys_if_the_proxy_has_none(fleet: Fleet) -> None:
    await ask(fleet, "/v1/messages", message(text()), {"X-API-Key": "k"})

    assert fleet.d.calls[0].headers["Authorization"] == "Bearer k"


@pytest.mark.security("S2")
@pytest.mark.parametrize("path", [path for path in PLAIN if not path.startswith(("/v1/", "/v2/"))])
async def test_instances_judge_the_key_of_paths_that_theirs_does_not_guard(
    fleet: Fleet, path: str
) -> None:
    """In vLLM, `--api-key` guards only paths under `/v1` and `/v2`."""
    for instance in fleet.instances:
        instance.api_key = "sk-instances"
    denied, reply = await ask(fleet, path, PLAIN[path], bearer("wrong"))
    assert (denied, fleet.d.calls) == (401, [])
    assert reply["error"]["code"] == 401

    assert (await ask(fleet, path, PLAIN[path], bearer("sk-instances")))[0] == 200


@pytest.mark.security("S2")
async def test_tokenizer_info_is_for_clients_with_a_valid_key(
    fleet: Fleet,
) -> None:
    fleet.d.api_key = "sk-instances"
    answers = []
    for key in ("wrong", "sk-instances"):
        async with fleet.http.get(f"{fleet.url}/tokenizer_info", headers=bearer(key)) as reply:
            answers.append((reply.status, await reply.json()))

    assert [status for status, _ in answers] == [401, 200]
    assert answers[1][1] == {"tokenizer_class": "T"}
    assert "GET /tokenizer_info" not in fleet.p.other_calls


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_sends_no_request_to_instances(launch: Launch, keys: Path, method: str) -> None:
    async with launch(api_keys_file=keys) as fleet:
        await fleet.ready()
        async with fleet.http.request(method, f"{fleet.url}/ping") as reply:
            assert (reply.status, await reply.json()) == (200, {"status": "ready"})
        assert all(instance.other_calls == [] for instance in fleet.instances)
