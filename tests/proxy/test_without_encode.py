"""Prefill and decode without encode instances, and decode alone."""

from pathlib import Path
from typing import Any

import pytest

from epd.policies.builtin import EncodePrefillDecode
from epd.policies.policy import Course
from tests.requests import Part, image, input_audio, request, text, video
from tests.support.fake_instance import KV_PARAMS, REPLY, STREAM
from tests.support.fleet import Launch

topologies = pytest.mark.parametrize("prefill", [0, 1], ids=["d", "pd"])
MEDIA = (image(b"1"), image(b"2"), input_audio(), video())


def without_uuids(parts: list[Part]) -> list[Part]:
    return [{key: value for key, value in part.items() if key != "uuid"} for part in parts]


@topologies
@pytest.mark.parametrize("stream", [False, True])
async def test_media_are_sent_unchanged(launch: Launch, prefill: int, stream: bool) -> None:
    async with launch(encode=0, prefill=prefill) as fleet:
        async with fleet.post(request(text(), *MEDIA, stream=stream)) as reply:
            assert reply.status == 200
            if stream:
                assert await reply.read() == b"".join(STREAM)
            else:
                assert await reply.json() == REPLY

        for instance in (*fleet.prefill, fleet.d):
            [call] = instance.calls
            assert without_uuids(call.parts) == [text(), *MEDIA]
            assert "ec_transfer_params" not in call.body
        assert fleet.d.calls[0].body.get("kv_transfer_params") == (KV_PARAMS if prefill else None)


async def test_prefill_and_decode_name_media_alike_and_other_media_otherwise(
    launch: Launch,
) -> None:
    async with launch(encode=0, prefill=1) as fleet:
        await fleet.chat(request(*MEDIA))

        [prefill], [decode] = fleet.p.calls, fleet.d.calls
        assert prefill.parts == decode.parts
        assert len({part["uuid"] for part in decode.parts}) == len(MEDIA)


@topologies
async def test_requests_without_an_encode_stage_are_not_degraded(
    launch: Launch, prefill: int
) -> None:
    async with launch(encode=0, prefill=prefill) as fleet:
        async with fleet.post(request(*MEDIA)) as reply:
            headers = reply.headers

        [done] = fleet.events.requests
        assert (done.error, done.degraded) == (None, set[str]())
        assert "encode" not in headers["Server-Timing"]


@topologies
async def test_health_has_an_empty_encode_cluster(launch: Launch, prefill: int) -> None:
    async with launch(encode=0, prefill=prefill) as fleet:
        async with fleet.http.get(fleet.url + "/health") as reply:
            body = await reply.json()

        assert (reply.status, body["encode_cluster"]) == (200, "empty")
        assert body["decode_cluster"] == "healthy"


async def test_a_picture_with_only_a_name_is_rejected(launch: Launch) -> None:
    async with launch(encode=0, prefill=1) as fleet:
        named = {"type": "image_url", "image_url": None, "uuid": "mine"}
        status, reply = await fleet.chat(request(named))

        assert (status, reply["error"]["param"]) == (404, "messages[0].content[0]")
        assert fleet.d.calls == []


@pytest.mark.parametrize("field", [{"n": 2}, {"prompt_logprobs": 1}])
async def test_requests_for_one_engine_go_to_decode_with_their_media(
    launch: Launch, field: dict[str, Any]
) -> None:
    """With encode instances too: decode beside prefill does not read encoder outputs."""
    async with launch(encode=1, prefill=1) as fleet:
        await fleet.chat(request(text(), *MEDIA, **field))

        assert (fleet.e.calls, fleet.p.calls) == ([], [])
        [call] = fleet.d.calls
        assert without_uuids(call.parts) == [text(), *MEDIA]
        assert "kv_transfer_params" not in call.body


async def test_no_policy_sends_prefill_a_request_that_it_cannot_serve(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EncodePrefillDecode, "course", lambda *_: Course())
    async with launch(prefill=1) as fleet:
        status, _ = await fleet.chat(request(text(), *MEDIA, n=2))

        assert (status, fleet.p.calls) == (200, [])
        [call] = fleet.d.calls
        assert without_uuids(call.parts) == [text(), *MEDIA]


async def test_encode_instances_that_come_by_a_file_are_waited_for(
    launch: Launch, tmp_path: Path
) -> None:
    """Only the operator's setting turns the encode stage off, not the absence of instances."""
    path = tmp_path / "instances.yaml"
    path.write_text("instances: []")
    async with launch(encode=0, instances_file=path) as fleet:
        await fleet.chat(request(image()))

        assert fleet.events.requests[0].degraded == {"encode-local"}


@pytest.mark.parametrize("prompt", ["hi", [1, 2], ["hi"], [[1, 2]]])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_is_prefilled_and_decoded(
    launch: Launch, prompt: Any, stream: bool
) -> None:
    async with launch(encode=0, prefill=1) as fleet:
        fields = {
            "prompt": prompt,
            "stream": stream,
            "suffix": "s",
            "logprobs": 2,
            "max_tokens": 9,
            "min_tokens": 3,
            "best_of": 1,
            "n": 1,
        } | ({"stream_options": {"include_usage": True}} if stream else {})
        async with fleet.http.post(
            f"{fleet.url}/v1/completions", json={"model": "m", **fields}
        ) as reply:
            assert reply.status == 200
            await reply.read()

        [prefill], [decode] = fleet.p.calls, fleet.d.calls
        assert decode.body == {"model": "m", **fields, "kv_transfer_params": KV_PARAMS}
        changed = {"max_tokens": 1, "stream": False}
        kept = {k: v for k, v in fields.items() if k not in {"min_tokens", "stream_options"}}
        prefill.body.pop("kv_transfer_params")
        assert prefill.body == {"model": "m", **kept, **changed}
