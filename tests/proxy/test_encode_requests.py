"""Encode requests: what they have of the client's request, and what an instance may refuse."""

import asyncio
from collections.abc import Awaitable, Hashable
from typing import Any

import pytest
from aiohttp import web

from epd.policies.policy import Course
from epd.request.attempt import Attempt
from epd.request.encode_job import EncodeJob
from epd.request.request import Request
from tests.requests import image, request, text
from tests.support.encode_fleet import CONFIG
from tests.support.fake_instance import ENCODE_TEXT, Handler, encodes, refuses
from tests.support.fleet import Fleet, Launch

TEMPLATE = {"chat_template": "{{ messages }}", "chat_template_kwargs": {"thinking": False}}
ASKED = {"model": "m", **TEMPLATE}


def knows(*models: str, trusts: bool = True) -> Handler:
    """Return an encode instance with these models that may accept a request's chat template."""

    async def chat(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body.get("model") not in {None, *models}:
            return await refuses(404, "The model does not exist.")(http, body)
        if not trusts and body.get("chat_template"):
            return await refuses(400, "Refused request with untrusted chat template.")(http, body)
        return await encodes(http, body)

    return chat


def encoded(fleet: Fleet) -> list[dict[str, Any]]:
    """Return the fields about model and template in each encode request."""
    fields = ("model", *TEMPLATE)
    return [
        {name: call.body[name] for name in fields if name in call.body} for call in fleet.e.calls
    ]


async def test_encode_request_has_template_and_text(launch: Launch) -> None:
    async with launch() as fleet:
        async with fleet.post(request(image(), text(), **TEMPLATE)) as reply:
            assert reply.status == 200

        assert encoded(fleet) == [ASKED]
        assert fleet.e.calls[0].body["messages"][0]["content"][-1] == ENCODE_TEXT


@pytest.mark.fault(2)
async def test_picture_under_the_name_of_an_adapter_is_encoded_by_the_model(
    launch: Launch,
) -> None:
    async with launch() as fleet:
        fleet.e.chat = knows("m")
        for number in range(3):
            picture = image(b"%d" % number)
            async with fleet.post(request(picture, model="adapter")) as reply:
                assert reply.status == 200
                assert reply.headers["x-epd-items"] == "hit=0,encoded=1,local=0"

        # The instance is asked once for the adapter.
        assert encoded(fleet) == [{"model": "adapter"}, {}, {}, {}]
        assert {call.body["model"] for call in fleet.d.calls} == {"adapter"}


async def test_encode_without_refused_fields_stays_in_the_time_of_its_first_request(
    launch: Launch,
) -> None:
    """Each of three answers would come within a time limit of its own."""
    answer = knows("m", trusts=False)

    async def slow(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.6)
        return await answer(http, body)

    config: Any = {"encode_timeout_s": 1.0, "on_encode_failure": "fail"}
    async with launch(**config) as fleet:
        fleet.e.chat = slow
        async with fleet.post(request(image(), model="adapter", **TEMPLATE)) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (504, "encode_timeout")

        [done] = [stage for stage in fleet.events.stages if stage.stage == "encode"]
        assert done.error == "encode_timeout"


async def test_untrusted_template_is_left_to_decode(launch: Launch) -> None:
    async with launch() as fleet:
        fleet.e.chat = knows("m", trusts=False)
        async with fleet.post(request(image(), **TEMPLATE)) as reply:
            assert reply.status == 200

        left = {name: value for name, value in ASKED.items() if name != "chat_template"}
        assert encoded(fleet) == [ASKED, left]
        assert fleet.d.calls[0].body["chat_template"] == TEMPLATE["chat_template"]


async def test_other_apis_have_no_template_of_their_own(launch: Launch) -> None:
    picture = {"type": "input_image", "image_url": image()["image_url"]["url"]}
    asked = {"model": "m", "input": [{"role": "user", "content": [picture]}], **TEMPLATE}
    async with launch() as fleet:
        async with fleet.http.post(f"{fleet.url}/v1/responses", json=asked) as reply:
            assert reply.status == 200

        left = {name: value for name, value in ASKED.items() if name != "chat_template"}
        assert encoded(fleet) == [left]


def requires_system(http: web.Request, body: dict[str, Any]) -> Awaitable[web.StreamResponse]:
    """Answer like an encode instance with a template that requires a system message."""
    begins_well = body["messages"][0]["role"] == "system"
    return (encodes if begins_well else refuses(400, "no system message"))(http, body)


def roles(fleet: Fleet) -> list[list[str]]:
    return [[message["role"] for message in call.body["messages"]] for call in fleet.e.calls]


async def test_template_that_requires_a_system_message_gets_one_of_a_client_that_sent_one(
    launch: Launch,
) -> None:
    system = {"role": "system", "content": "long " * 100}
    async with launch() as fleet:
        fleet.e.chat = requires_system
        for number in range(2):
            asked = request(image(b"%d" % number))
            asked["messages"].insert(0, system)
            async with fleet.post(asked) as reply:
                assert reply.status == 200
        assert roles(fleet) == [["user"], ["system", "user"], ["system", "user"]]
        sent = fleet.e.calls[-1].body["messages"][0]
        assert sent == {"role": "system", "content": ENCODE_TEXT["text"]}

        assert (await fleet.chat(request(image(b"without"))))[0] == 400
        assert roles(fleet)[3:] == [["user"]]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"instructions": "Be brief."}),
        ("/v1/messages", {"system": "Be brief.", "max_tokens": 8}),
    ],
)
async def test_system_messages_of_other_apis_count(
    launch: Launch, path: str, fields: dict[str, Any]
) -> None:
    url = image()["image_url"]["url"]
    data = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    messages = path == "/v1/messages"
    part = (
        {"type": "image", "source": data} if messages else {"type": "input_image", "image_url": url}
    )
    said = [{"role": "user", "content": [part]}]
    body = {"model": "m", "messages" if messages else "input": said, **fields}
    async with launch() as fleet:
        fleet.e.chat = requires_system
        async with fleet.http.post(f"{fleet.url}{path}", json=body) as reply:
            assert reply.headers["x-epd-items"] == "hit=0,encoded=1,local=0"

        assert roles(fleet) == [["user"], ["system", "user"]]


def test_requests_share_an_encode_only_if_no_instance_can_refuse_one_of_them() -> None:
    def sharing(headers: dict[str, str] | None = None, **fields: Any) -> Hashable:
        body = {"model": "m", **request(image(), text("a question")), **fields}
        asked = Request("id", headers or {}, CONFIG, body=body)
        return EncodeJob(Attempt(asked, Course(), [])).sharing

    others = [
        sharing({"Authorization": "Bearer other"}),
        sharing(chat_template="{{ messages }}"),
        sharing(chat_template_kwargs={"x": 1}),
        sharing(system="Be brief."),
    ]
    assert sharing() == sharing(messages=request(image(), text("another"))["messages"])
    assert len({sharing(), *others}) == 1 + len(others)
