"""Two namespaces behind one proxy, as during a rolling update of the weights."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ec_store import Store
from tests.requests import image, request, text
from tests.support.backed import BUDGET_S, Backed, items_of, media_types
from tests.support.fake_instance import FakeInstance, prefills, refuses
from tests.support.fleet import Fleet, Launch, until

OLD, NEW = "m@0:old", "m@0:new"


class Says:
    """Metrics page of an instance with its namespace."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.asked = 0

    async def __call__(self) -> web.Response:
        self.asked += 1
        labels = f'engine="0",model_name="m",namespace="{self.namespace}"'
        return web.Response(text=f"# HELP\nvllm:ec_store_namespace_info{{{labels}}} 1.0\n")


@pytest.fixture
def both(store: Store, tmp_path: Path) -> dict[str, Backed]:
    """Return the handlers of each namespace. The store has the new one registered for the model."""
    store.register_namespace("m", NEW)
    return {name: Backed(store, tmp_path / "store", name) for name in (OLD, NEW)}


@asynccontextmanager
async def updating(  # noqa: PLR0913 - a fleet
    launch: Launch,
    url: str,
    both: dict[str, Backed],
    *,
    encode: str = "",
    prefill: str = "",
    decode: str,
    **config: Any,
) -> AsyncIterator[Fleet]:
    """Run a fleet with old (`o`) and new (`n`) weights; each letter is an instance."""
    names = {"o": OLD, "n": NEW}
    defaults = {"ec_store": url, "ec_store_budget_s": BUDGET_S, "load_interval_s": 0.05}
    numbers = {"encode": len(encode), "prefill": len(prefill), "decode": len(decode)}
    settings: dict[str, Any] = numbers | defaults | config
    async with launch(**settings) as fleet:
        pages = []
        for instance, letter in zip(fleet.instances, encode + prefill + decode, strict=True):
            instance.metrics = says = Says(names[letter])
            pages.append(says)
            if instance in fleet.encode:
                instance.chat = both[says.namespace].encodes
            elif instance in (fleet.prefill or fleet.decode):
                instance.chat = both[says.namespace].decodes
        await until(lambda: all(one.asked > 1 for one in pages))
        yield fleet
        await written(both)


async def written(both: dict[str, Backed]) -> None:
    await asyncio.gather(*both[OLD].writes, *both[NEW].writes)


def calls(instances: list[FakeInstance]) -> list[int]:
    return [len(instance.calls) for instance in instances]


@pytest.mark.parametrize("decode", ["on", "no"])
async def test_each_consumer_gets_outputs_of_its_own_weights(
    launch: Launch, url: str, both: dict[str, Backed], decode: str
) -> None:
    async with updating(launch, url, both, encode="on", decode=decode) as fleet:
        found = []
        for _ in range(6):
            found.append(await items_of(fleet, request(text(), image())))
            await written(both)

        assert sorted(map(str, found)) == ["{'encoded': 1}"] * 2 + ["{'hit': 1}"] * 4
        assert calls(fleet.encode) == [1, 1]
        assert calls(fleet.decode) == [3, 3]
        for consumer in fleet.decode:
            assert media_types(consumer) == [["text", "image_embeds"]] * 3


async def test_requests_of_two_namespaces_share_no_running_encode(
    launch: Launch, url: str, both: dict[str, Backed]
) -> None:
    async with updating(launch, url, both, encode="on", decode="on") as fleet:
        for backed in both.values():
            backed.encode_s = 0.5
        found = await asyncio.gather(*(items_of(fleet, request(text(), image())) for _ in range(6)))

        assert sum(one.get("encoded", 0) for one in found) == 2
        assert calls(fleet.encode) == [1, 1]
        for consumer in fleet.decode:
            assert media_types(consumer) == [["text", "image_embeds"]] * 3


async def test_prefill_is_chosen_before_its_items_are_looked_up(
    launch: Launch, url: str, both: dict[str, Backed]
) -> None:
    async with updating(launch, url, both, encode="on", prefill="on", decode="n") as fleet:
        for consumer in fleet.prefill:
            consumer.chat = _prefills_of(both[consumer.metrics.namespace])  # type: ignore[attr-defined]
        for _ in range(4):
            await items_of(fleet, request(text(), image()))
            await written(both)

        assert calls(fleet.encode) == [1, 1]
        assert calls(fleet.prefill) == [2, 2]


def _prefills_of(backed: Backed) -> Any:
    async def chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        reply = await backed.decodes(request, body)
        return reply if reply.status != 200 else await prefills(request, body)

    return chat


async def test_a_retry_at_a_prefill_of_another_namespace_encodes_the_items_for_it(
    launch: Launch, url: str, both: dict[str, Backed]
) -> None:
    async with updating(launch, url, both, encode="on", prefill="on", decode="n") as fleet:
        first, second = fleet.prefill
        first.chat = refuses(503, "overloaded")
        second.chat = _prefills_of(both[NEW])
        for _ in range(4):
            await items_of(fleet, request(text(), image()))
            await written(both)

        assert first.calls
        assert len(second.calls) == 4
        assert {str(one) for one in media_types(second)} == {"['text', 'image_embeds']"}


async def test_lookup_uses_the_namespace_of_the_consumer(
    launch: Launch, url: str, both: dict[str, Backed]
) -> None:
    """The store names the namespace of the instance that was started last."""
    async with updating(launch, url, both, encode="o", decode="o") as fleet:
        await items_of(fleet, request(text(), image()))
        await written(both)

        assert await items_of(fleet, request(text(), image())) == {"hit": 1}
        assert calls(fleet.encode) == [1]


async def test_a_consumer_encodes_without_an_encode_instance_of_its_namespace(
    launch: Launch, url: str, both: dict[str, Backed]
) -> None:
    async with updating(launch, url, both, encode="o", decode="on") as fleet:
        for _ in range(4):
            await items_of(fleet, request(text(), image()))
            await written(both)

        assert calls(fleet.encode) == [1]
        old, new = fleet.decode
        assert media_types(old) == [["text", "image_embeds"]] * 2
        assert media_types(new) == [["text", "image_url"]] * 2


async def test_with_encoding_required_a_consumer_of_another_namespace_is_a_failure(
    launch: Launch, url: str, both: dict[str, Backed]
) -> None:
    async with updating(
        launch, url, both, encode="o", decode="n", on_encode_failure="fail"
    ) as fleet:
        status, body = await fleet.chat(request(text(), image()))

        assert status == 503
        assert "namespace" in body["error"]["message"]
        assert calls(fleet.encode) == [0]


async def test_an_output_of_another_namespace_is_not_promised(
    launch: Launch, url: str, both: dict[str, Backed]
) -> None:
    """The encode instance was restarted with new weights, and the proxy has not polled it since."""
    async with updating(launch, url, both, encode="o", decode="o") as fleet:
        fleet.e.chat = both[NEW].encodes
        await items_of(fleet, request(text(), image()))

        assert media_types(fleet.d) == [["text", "image_url"]]
        assert "ec_transfer_params" not in fleet.d.calls[0].body


async def test_media_sent_ahead_are_found_in_every_namespace(
    launch: Launch, url: str, both: dict[str, Backed]
) -> None:
    async with updating(launch, url, both, encode="o", decode="on") as fleet:
        body = {"model": "m", "content": [image()]}
        async with fleet.http.post(f"{fleet.url}/v1/media", json=body) as reply:
            said = await reply.json()

        assert reply.status == 200, said
        assert [one["result"] for one in said["data"]] == ["encoded"]


async def test_media_keep_the_proxys_keys_after_the_local_prefill_instance_left(
    launch: Launch, url: str, both: dict[str, Backed]
) -> None:
    """The earlier attempts failed before they could encode anything."""
    local = {
        "policies": ("prefill_local_decode_remote",),
        "local_prefill_url": "http://127.0.0.1:9",
        "dynamic_registration": True,
        "admin_api_key": "a" * 32,
    }
    async with updating(launch, url, both, encode="on", prefill="on", decode="n", **local) as fleet:
        status, body = await fleet.chat(request(text(), image(uuid="clients-own")))

        assert status == 200, body
        assert fleet.d.calls[0].parts[-1]["uuid"] != "clients-own"
        assert fleet.events.requests[-1].items == {"encoded": 1}
