"""Media in requests at the endpoints other than chat: encoding, storing, validation."""

import asyncio
import json

import pytest

from epd.api.endpoints import ENDPOINTS
from tests.proxy.endpoints import (
    URL,
    WITH_MEDIA,
    WORDS,
    ask,
    block,
    chat,
    content_of,
    linked,
    message,
    picture,
    response,
    with_media,
)
from tests.requests import data_url, image, text
from tests.support.backed import Backed, caching
from tests.support.fake_origin import FakeOrigin
from tests.support.fleet import Fleet, Launch


async def test_a_picture_of_a_response_is_encoded_as_one_of_a_chat_is(fleet: Fleet) -> None:
    await ask(fleet, "/v1/responses", response(WORDS, picture()))
    await ask(fleet, "/v1/chat/completions", chat(image()))

    of_response, of_chat = fleet.e.calls
    assert of_response.path == "/v1/chat/completions"
    assert of_response.body == of_chat.body
    key = of_chat.parts[0]["uuid"]
    for instance in (fleet.p, fleet.d):
        [_, part] = instance.calls[0].body["input"][0]["content"]
        assert part == {
            "type": "input_image",
            "detail": "auto",
            "image_embeds": {"image_grid_thw": [1, 36, 54]},
            "uuid": key,
        }
    assert key in fleet.p.calls[0].body["ec_transfer_params"]


async def test_a_picture_of_a_message_is_encoded_and_named_by_the_engines(fleet: Fleet) -> None:
    await ask(fleet, "/v1/messages", message(text(), block()))

    [encode] = fleet.e.calls
    assert encode.parts == [{"type": "image_url", "image_url": {"url": URL}}]
    for instance in (fleet.p, fleet.d):
        [_, part] = instance.calls[0].body["messages"][0]["content"]
        assert part == linked(URL)


async def test_a_picture_is_encoded_once_for_chat_and_responses(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        for path, body in (
            ("/v1/chat/completions", chat(image(URL))),
            ("/v1/responses", response(picture())),
            ("/v1/responses", response(picture(), WORDS)),
        ):
            assert (await ask(fleet, path, body))[0] == 200
            await asyncio.gather(*backed.writes)

        assert len(fleet.e.calls) == 1


async def test_a_picture_of_messages_is_encoded_once_while_the_store_has_it(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        for _ in range(3):
            assert (await ask(fleet, "/v1/messages", message(block())))[0] == 200
            await asyncio.gather(*backed.writes)
        assert len(fleet.e.calls) == 1

        await backed.forget()
        await ask(fleet, "/v1/messages", message(block()))
        assert len(fleet.e.calls) == 2


async def test_a_message_does_not_use_the_chats_entry_of_a_picture(
    launch: Launch, backed: Backed, url: str
) -> None:
    """The chat's entry has a key that no engine derives from the picture."""
    async with caching(launch, backed, url) as fleet:
        for path, body in (
            ("/v1/chat/completions", chat(image(URL))),
            ("/v1/messages", message(block())),
        ):
            await ask(fleet, path, body)
            await asyncio.gather(*backed.writes)

        assert len(fleet.e.calls) == 2


@pytest.mark.security("S11")
@pytest.mark.parametrize("path", [path for path in WITH_MEDIA if not ENDPOINTS[path].encodes])
async def test_media_that_are_passed_on_go_raw_and_under_our_key(fleet: Fleet, path: str) -> None:
    named = path not in {"/v1/messages/count_tokens", "/v2/embed"}
    body = WITH_MEDIA[path](URL)
    content_of(body)[0] |= {"uuid": "own"} if named else {}
    assert (await ask(fleet, path, body))[0] == 200

    assert fleet.e.calls == []
    [part] = content_of(fleet.d.calls[0].body)
    assert URL in json.dumps(part)
    assert ("uuid" in part) is named
    assert part.get("uuid", "key") != "own"
    assert fleet.events.requests[0].items == {}


@pytest.mark.security("S9")
@with_media
@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://a/b", "http://user@a/b", "https://a\\b/c", "x"]
)
async def test_no_endpoint_names_a_place_that_no_request_may_name(
    fleet: Fleet, path: str, url: str
) -> None:
    status, _ = await ask(fleet, path, WITH_MEDIA[path](url))

    assert status == 400
    assert fleet.e.calls == fleet.p.calls == fleet.d.calls == []


@pytest.mark.security("S7")
@with_media
async def test_no_endpoint_reaches_a_private_address(launch: Launch, path: str) -> None:
    async with launch(media_fetch="proxy", allowed_media_domains=("127.0.0.1",)) as fleet:
        status, _ = await ask(fleet, path, WITH_MEDIA[path]("https://127.0.0.1/a.png"))

        assert status == 400
        assert fleet.e.calls == fleet.d.calls == []


@pytest.mark.security("S10")
@with_media
async def test_every_endpoint_limits_the_number_of_items(launch: Launch, path: str) -> None:
    async with launch(max_items=1) as fleet:
        body = WITH_MEDIA[path](URL)
        content_of(body).extend(content_of(WITH_MEDIA[path](URL)))
        status, _ = await ask(fleet, path, body)

        assert status == 400
        assert fleet.d.calls == []


@pytest.mark.security("S11")
@pytest.mark.parametrize("path", [path for path in WITH_MEDIA if "messages" not in path])
async def test_no_endpoint_takes_an_output_for_its_media(fleet: Fleet, path: str) -> None:
    part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 2, 2]}, "uuid": "k"}
    body = WITH_MEDIA[path](URL)
    content_of(body)[0] = part
    status, reply = await ask(fleet, path, body)

    assert status == 400
    assert reply["error"]["param"].endswith("content[0]")
    assert fleet.d.calls == []


@pytest.mark.security("S6")
@with_media
async def test_no_endpoint_takes_kwargs_that_are_not_trusted(fleet: Fleet, path: str) -> None:
    body = WITH_MEDIA[path](URL) | {"mm_processor_kwargs": {"max_pixels": 1}}
    await ask(fleet, path, body)

    assert all("mm_processor_kwargs" not in call.body for call in [*fleet.e.calls, *fleet.d.calls])


@pytest.mark.security("S9")
@pytest.mark.parametrize("url", ["file:///etc/passwd", "x", URL])
async def test_images_that_are_strings_are_checked_and_passed_on(fleet: Fleet, url: str) -> None:
    status, reply = await ask(fleet, "/v2/embed", {"images": [URL, url]})

    assert status == (200 if url == URL else 400)
    assert [call.body for call in fleet.d.calls] == ([{"images": [URL, url]}] if url == URL else [])
    assert url == URL or reply["error"]["param"] == "images[1]"


async def test_images_that_are_strings_are_fetched_by_the_proxy(launch: Launch) -> None:
    async with FakeOrigin().running() as origin:
        more = {"allow_http_media": True, "allow_private_media": True}
        domains = ("127.0.0.1",)
        async with launch(media_fetch="proxy", allowed_media_domains=domains, **more) as fleet:
            picture = f"http://127.0.0.1:{origin.port}/"
            assert (await ask(fleet, "/v2/embed", {"images": [picture]}))[0] == 200

            assert fleet.d.calls[0].body == {"images": [data_url(b"picture")]}


async def test_a_picture_that_was_pushed_is_named_in_a_response(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        pushed = {"model": "m", "content": [image(URL, uuid="cat")]}
        assert (await ask(fleet, "/v1/media", pushed))[0] == 200
        named = {"type": "input_image", "uuid": "cat"}

        assert (await ask(fleet, "/v1/responses", response(named)))[0] == 200
        assert (await ask(fleet, "/v1/responses", response(named | {"uuid": "dog"})))[0] == 404
        assert len(fleet.e.calls) == 1
