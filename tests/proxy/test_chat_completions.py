"""Chat completions: the requests to each instance, and the response to the client."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.requests import audio_url, image, input_audio, request, text, video
from tests.support.fake_instance import KV_PARAMS, REPLY, encodes_without_params, refuses
from tests.support.fleet import Launch
from tests.support.strict_instance import KEEP


async def test_each_item_is_one_encode_request_without_text(launch: Launch) -> None:
    async with launch() as fleet:
        body = request(text(), image(b"1"), audio_url(), input_audio(b"other"), video())
        status, _ = await fleet.chat(body | {"stream": False, "max_tokens": 5})

        assert status == 200
        sent = sorted(call.parts[0]["type"] for call in fleet.e.calls)
        assert sent == ["audio_url", "image_url", "input_audio", "video_url"]
        for call in fleet.e.calls:
            assert len(call.parts) == 1
            assert call.body["model"] == "m"
            assert call.body["stream"] is False
            assert call.body["max_tokens"] == 1


async def test_text_touches_no_encoder(launch: Launch) -> None:
    async with launch() as fleet:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "seed": 1}
        status, reply = await fleet.chat(body)

        assert (status, reply) == (200, REPLY)
        assert fleet.e.calls == []
        assert fleet.d.calls[0].body == body


async def test_encode_is_sent_kwargs_and_no_priority(launch: Launch) -> None:
    async with launch(trust_request_mm_kwargs=True) as fleet:
        more = {
            "mm_processor_kwargs": {"max_pixels": 9},
            "media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}},
        }
        await fleet.chat(request(image(), priority=3, **more))

        assert more.items() <= fleet.e.calls[0].body.items()
        assert "priority" not in fleet.e.calls[0].body
        assert (more | {"priority": 3}).items() <= fleet.d.calls[0].body.items()


async def test_encoded_items_are_sent_as_metadata_under_the_same_uuid(launch: Launch) -> None:
    async with launch(prefill=1) as fleet:
        await fleet.chat(request(text(), image(b"1"), input_audio()))

        uuids = {call.parts[0]["type"]: call.parts[0]["uuid"] for call in fleet.e.calls}
        expected = [
            text(),
            {
                "type": "image_embeds",
                "image_embeds": {"image_grid_thw": [1, 36, 54]},
                "uuid": uuids["image_url"],
            },
            {
                "type": "audio_embeds",
                "audio_embeds": {"audio_num_tokens": [50]},
                "uuid": uuids["input_audio"],
            },
        ]
        assert len(set(uuids.values())) == 2
        for call in (fleet.p.calls[0], fleet.d.calls[0]):
            assert expected == call.parts
        assert set(uuids.values()) == set(fleet.p.calls[0].body["ec_transfer_params"])


async def test_a_decode_instance_is_told_of_no_encoder_outputs(launch: Launch) -> None:
    async with launch(prefill=1) as fleet:
        await fleet.chat(request(image(b"1")))
        fleet.p.chat = refuses(503)
        await fleet.chat(request(image(b"2")))

        by_prefill, alone = fleet.d.calls
        assert "ec_transfer_params" not in by_prefill.body
        assert alone.parts[0]["type"] == "image_url"
        assert "ec_transfer_params" not in alone.body


@pytest.mark.parametrize("prefill", [0, 1])
async def test_media_are_sent_raw_if_the_encoder_reports_no_metadata(
    launch: Launch, prefill: int
) -> None:
    async with launch(prefill=prefill) as fleet:
        fleet.e.chat = encodes_without_params
        await fleet.chat(request(image(b"1"), text()))

        uuid = fleet.e.calls[0].parts[0]["uuid"]
        for call in fleet.d.calls + [instance.calls[0] for instance in fleet.prefill]:
            assert call.parts == [image(b"1", uuid=uuid), text()]
            assert "ec_transfer_params" not in call.body


async def test_media_are_sent_raw_with_decode_media_raw(launch: Launch) -> None:
    async with launch(decode_media="raw") as fleet:
        await fleet.chat(request(image(b"1")))

        uuid = fleet.e.calls[0].parts[0]["uuid"]
        assert fleet.d.calls[0].parts == [image(b"1", uuid=uuid)]
        assert list(fleet.d.calls[0].body["ec_transfer_params"]) == [uuid]


async def test_remote_media_are_keyed_by_the_report_of_the_encoder(launch: Launch) -> None:
    async with launch() as fleet:
        await fleet.chat(request(image("https://example.com/a.png", uuid="mine")))

        assert "uuid" not in fleet.e.calls[0].parts[0]
        [key] = fleet.d.calls[0].body["ec_transfer_params"]
        assert fleet.d.calls[0].parts[0]["uuid"] == key


@pytest.mark.parametrize("given", ["a" * 128, "A.b_c:d-9", None])
async def test_a_clients_uuid_beside_media_changes_nothing(
    launch: Launch, given: str | None
) -> None:
    async with launch() as fleet:
        await fleet.chat(request(image(b"cat")))
        status, _ = await fleet.chat(request(image(b"cat", uuid=given)))

        plain, named = (call.parts[0]["uuid"] for call in fleet.e.calls)
        assert status == 200
        assert plain == named


@pytest.mark.security("S13")
@pytest.mark.parametrize("given", ["a" * 129, "a b", "a/b", "é", "a\n", 7, ["a"], False])
async def test_an_invalid_uuid_is_refused(launch: Launch, given: object) -> None:
    async with launch() as fleet:
        status, reply = await fleet.chat(request(text(), image(b"cat", uuid=given)))

        assert (status, reply["error"]["param"]) == (400, "messages[0].content[1].uuid")
        assert fleet.e.calls == []


async def test_prefill_then_decode_with_its_kv_transfer_params(launch: Launch) -> None:
    async with launch(prefill=1) as fleet:
        body = request(
            image(),
            stream=True,
            stream_options={"include_usage": True},
            min_tokens=4,
            max_completion_tokens=8,
            temperature=0,
        )
        async with fleet.post(body) as reply:
            await reply.read()

        prefill, decode = fleet.p.calls[0].body, fleet.d.calls[0].body
        assert prefill["kv_transfer_params"] == KEEP
        assert (prefill["max_tokens"], prefill["max_completion_tokens"]) == (1, 1)
        assert prefill["stream"] is False
        assert "stream_options" not in prefill
        assert "min_tokens" not in prefill
        assert decode["kv_transfer_params"] == KV_PARAMS
        assert decode["stream_options"] == {"include_usage": True}
        assert (decode["min_tokens"], decode["max_completion_tokens"]) == (4, 8)
        assert prefill["messages"] == decode["messages"]


@pytest.mark.parametrize("prefill", [0, 1])
async def test_the_official_client_is_served(launch: Launch, prefill: int) -> None:
    async with (
        launch(prefill=prefill) as fleet,
        openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="k", max_retries=0) as client,
    ):
        messages = request(text(), image())["messages"]
        whole = await client.chat.completions.create(model="m", messages=messages)
        stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
        pieces = [event.choices[0].delta.content async for event in stream]

        assert whole.choices[0].message.content == "aé"
        assert pieces == ["a", "é"]


@pytest.mark.security("S5")
@pytest.mark.fault(54)
@pytest.mark.fault(55)
async def test_headers_that_are_forwarded_and_headers_that_are_not(launch: Launch) -> None:
    async with launch(prefill=1) as fleet:
        sent = {
            "Authorization": "Bearer client",
            "traceparent": "00-1-2-01",
            "tracestate": "a=b,c=d",
            "x-request-id": "my-id_1.2",
            "x-data-parallel-rank": "1",
            "Cookie": "c=1",
        }
        async with fleet.post(request(image()), sent) as reply:
            assert reply.headers["x-request-id"] == "my-id_1.2"

        for instance in (fleet.e, fleet.p, fleet.d):
            got = instance.calls[0].headers
            assert got["authorization"] == "Bearer client"
            assert got["traceparent"] == "00-1-2-01"
            assert got["tracestate"] == "a=b,c=d"
            assert "x-data-parallel-rank" not in got
            assert "cookie" not in got
        ids = [
            instance.calls[0].headers["X-Request-Id"] for instance in (fleet.e, fleet.p, fleet.d)
        ]
        parent, item, random = ids[0].split(":")
        assert ids[1:] == [parent, parent]
        assert (item, len(random)) == ("0", 6)


async def test_the_key_of_the_proxy_is_sent_for_clients_without_one(launch: Launch) -> None:
    async with launch(openai_api_key="own") as fleet:
        await fleet.chat(request(image()))
        await fleet.chat(request(image()), headers={"Authorization": "Bearer client"})

        keys = [call.headers["Authorization"] for call in fleet.e.calls]
        assert keys == ["Bearer own", "Bearer client"]


async def test_stage_times_reach_the_client_and_the_observers(launch: Launch) -> None:
    async with launch(prefill=1) as fleet:
        async with fleet.post(request(image(b"1"), image(b"2"))) as reply:
            timing = reply.headers["Server-Timing"]

        stages = [entry.split(";")[0].strip() for entry in timing.split(",")]
        assert stages == ["encode", "prefill", "decode"]
        assert [event.stage for event in fleet.events.stages] == [
            "encode",
            "encode",
            "prefill",
            "decode",
        ]
        [done] = fleet.events.requests
        assert (done.status, done.error, len(done.stages)) == (200, None, 4)


async def test_an_integer_of_more_than_64_bits_reaches_the_instances(launch: Launch) -> None:
    schema = {"type": "integer", "maximum": 2**64}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    more: dict[str, Any] = {"tools": tools, "chat_template_kwargs": {"seed": 2**70}}
    async with launch(prefill=1) as fleet:
        asked = request(image(b"1"), text(), **more, conversation_id="c")
        assert (await fleet.chat(asked))[0] == 200

        for call in (fleet.p.calls[-1], fleet.d.calls[-1]):
            assert call.body["tools"] == tools
            assert call.body["chat_template_kwargs"] == {"seed": 2**70}


async def test_a_folder_that_hangs_keeps_no_other_request_waiting(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, resolve = threading.Event(), Path.resolve

    def hangs(self: Path, *args: Any) -> Path:
        go.wait(60)
        return resolve(self, *args)

    async with launch(allowed_local_media_path=tmp_path, media_timeout_s=0.5) as fleet:
        monkeypatch.setattr(Path, "resolve", hangs)
        asked = asyncio.create_task(fleet.chat(request(image("file:///a.png"))))
        try:
            await asyncio.sleep(0.1)
            assert (await fleet.chat(request(text())))[0] == 200
            assert (await asked)[0] == 422
        finally:
            go.set()


async def test_processor_kwargs_keep_media_raw_that_have_no_uuid_of_ours(launch: Launch) -> None:
    async with launch(trust_request_mm_kwargs=True) as fleet:
        more = {"mm_processor_kwargs": {"max_pixels": 9}}
        await fleet.chat(request(image("https://example.com/a.png"), **more))
        await fleet.chat(request(image(b"1"), **more))

        remote, inline = (call.parts[0] for call in fleet.d.calls)
        assert remote == image("https://example.com/a.png")
        assert inline["type"] == "image_embeds"
        assert inline["uuid"] == fleet.e.calls[1].parts[0]["uuid"]


async def test_json_numbers_and_order_reach_decode(launch: Launch) -> None:
    async with launch() as fleet:
        body = json.dumps(request(text(), temperature=0.1, top_p=1, logit_bias={"5": -100}))
        await fleet.chat(body.encode())

        assert json.dumps(fleet.d.calls[0].body) == body
