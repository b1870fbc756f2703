"""The minimal proxy that the overhead benchmark compares with does all work that is measured."""

import aiohttp
from aiohttp.test_utils import TestServer

from scripts.contenders.least import Instances, create_app
from tests.requests import image, request, text
from tests.support.fake_instance import FakeInstance, decodes, encodes, prefills


async def test_least_encodes_each_picture_and_decodes_without_media() -> None:
    encode, prefill, decode = FakeInstance(encodes), FakeInstance(prefills), FakeInstance(decodes)
    async with encode.running(), prefill.running(), decode.running():
        app = create_app(Instances(encode.url, prefill.url, decode.url))
        async with TestServer(app) as server, aiohttp.ClientSession() as http:
            url = server.make_url("/v1/chat/completions")
            asked = request(image(), image("red"), text())
            async with http.post(url, json=asked) as reply:
                whole = (reply.status, reply.content_type)
            async with http.post(url, json={**asked, "stream": True}) as reply:
                stream = (reply.status, reply.content_type, await reply.read())

    assert whole == (200, "application/json")
    assert stream[:2] == (200, "text/event-stream")
    assert stream[2].endswith(b"data: [DONE]\n\n")
    assert (len(encode.calls), len(prefill.calls), len(decode.calls)) == (4, 2, 2)
    sent = [call.body["messages"][0]["content"] for call in encode.calls]
    assert sent[0] != sent[1]
    for call in (*prefill.calls, *decode.calls):
        parts = [part for part in call.body["messages"][0]["content"] if "image_url" in part]
        assert [part["image_url"] for part in parts] == [None, None]
