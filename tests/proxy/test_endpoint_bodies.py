"""Forms and bodies at the endpoints other than chat: parsing, validation, reserved fields."""

import json
from io import BytesIO
from typing import Any

import aiohttp
import pytest

from epd.api.forms import read_form
from tests.proxy.endpoints import PLAIN, URL, WITH_MEDIA, ask, content_of
from tests.support.fleet import Fleet, Launch


@pytest.mark.parametrize("kind", ["transcriptions", "translations"])
async def test_a_form_is_rebuilt_for_decode(fleet: Fleet, kind: str) -> None:
    sound = b"\0\xff" * 100_000
    form = aiohttp.FormData({"model": "m", "chunking_strategy": "auto"})
    form.add_field("file", sound, filename="a.wav", content_type="audio/wav")
    async with fleet.http.post(f"{fleet.url}/v1/audio/{kind}", data=form) as reply:
        assert await reply.json() == {"text": "aé"}

    [call] = fleet.d.calls
    sent = {
        part.name: bytes(part.data)
        for part in read_form(call.body["form"], call.headers["Content-Type"])
    }
    assert sent == {"model": b"m", "file": sound}


@pytest.mark.fault(74)
@pytest.mark.security("S5")
@pytest.mark.parametrize("path", PLAIN)
@pytest.mark.parametrize("value", ["null", '""', "0", "[]", "{}", '{"do_remote_prefill": true}'])
async def test_no_instance_gets_a_reserved_field_of_a_client(
    fleet: Fleet, path: str, value: str
) -> None:
    """The proxy removes the field, even duplicated, from body, query and headers."""
    reserved = ["kv_transfer_params", "ec_transfer_params"]
    twice = "".join(f'"{name}": {value}, ' for name in reserved) * 2
    raw = b"{" + twice.encode() + json.dumps(PLAIN[path]).encode()[1:]
    query = "&".join(f"{name}={value}" for name in (*reserved, "vllm_xargs"))
    headers = {"Content-Type": "application/json"} | dict.fromkeys(reserved, value)
    async with fleet.http.post(
        f"{fleet.url}{path}?{query}", data=BytesIO(raw), headers=headers
    ) as reply:
        assert reply.status == 200

    calls = [call for instance in fleet.instances for call in instance.calls]
    assert calls
    for call in calls:
        assert call.query == ""
        assert not {name.lower() for name in call.headers} & {*reserved, "vllm_xargs"}
        # The proxy may set these fields itself, but not to the client's value.
        assert json.loads(value) not in [call.body[name] for name in reserved if name in call.body]


JSON_ROUTES = [
    *(("POST", path) for path in PLAIN),
    ("POST", "/v1/media"),
    ("POST", "/instances"),
    ("POST", "/start_profile"),
]


@pytest.mark.security("S27")
@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "text/plain; charset=application/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=application/json",
        "application/json, text/plain",
        "application/jsonx",
        "json",
        "",
    ],
)
async def test_a_body_without_a_json_content_type_is_rejected(launch: Launch, kind: str) -> None:
    """Without a CORS preflight, a web page of another origin may send the first ones."""
    key = {"X-API-Key": "admin-key-0123456789", "Content-Type": kind}
    settings: dict[str, Any] = {"admin_api_key": key["X-API-Key"], "dynamic_registration": True}
    async with launch(prefill=1, **settings) as fleet:
        for method, path in JSON_ROUTES:
            body = json.dumps(PLAIN.get(path, {"a": 1})).encode()
            async with fleet.http.request(
                method, fleet.url + path, data=BytesIO(body), headers=key
            ) as reply:
                assert reply.status == 415, path
                assert reply.headers["x-epd-error"] == "unsupported_media_type"
        assert all(instance.calls == [] for instance in fleet.instances)
        assert all("profile" not in " ".join(one.other_calls) for one in fleet.instances)


@pytest.mark.parametrize("path", PLAIN)
@pytest.mark.parametrize(
    "kind", ["Application/JSON; charset=utf-8", "application/json;", "application/ld+json"]
)
async def test_a_body_with_a_json_content_type_is_answered(
    fleet: Fleet, path: str, kind: str
) -> None:
    body, headers = BytesIO(json.dumps(PLAIN[path]).encode()), {"Content-Type": kind}
    async with fleet.http.post(fleet.url + path, data=body, headers=headers) as reply:
        assert reply.status == 200


@pytest.mark.fault(74)
@pytest.mark.security("S26")
@pytest.mark.parametrize("path", WITH_MEDIA)
@pytest.mark.parametrize("kind", ["point_cloud_url", "prompt_embeds", "input_file"])
async def test_no_instance_gets_a_content_part_that_no_check_covers(
    fleet: Fleet, path: str, kind: str
) -> None:
    part = {"type": kind, kind: {"url": "http://169.254.169.254/"}, "data": "AAAA"}
    body = WITH_MEDIA[path](URL) | {"conversation_id": "c"}
    content_of(body).append(part)
    status, reply = await ask(fleet, path, body)

    assert (status, reply["error"]["type"]) in {
        (400, "BadRequestError"),
        (400, "invalid_request_error"),
    }
    assert all(instance.calls == [] for instance in fleet.instances)


async def test_a_form_is_as_large_as_any_body_may_be(launch: Launch) -> None:
    async with launch(max_body_bytes=2000) as fleet:
        form = aiohttp.FormData({"file": BytesIO(bytes(2000))})
        async with fleet.http.post(f"{fleet.url}/v1/audio/transcriptions", data=form) as reply:
            assert reply.status == 413
        assert fleet.d.calls == []
