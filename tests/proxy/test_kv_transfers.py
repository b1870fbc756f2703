"""Every KV transfer, with instances that accept only what their connector accepts."""

import asyncio
import itertools
from typing import Any

import pytest

from tests.requests import request, text
from tests.support.fleet import Launch
from tests.support.strict_instance import strict


async def test_a_push_is_in_turn_until_the_prefill_instance_is_known(launch: Launch) -> None:
    async with strict(launch, "nixl-push") as (fleet, _):
        for _ in range(3):
            async with fleet.post(request(text())) as reply:
                assert reply.status == 200

        blocks = ["remote_block_ids" in call.body["kv_transfer_params"] for call in fleet.d.calls]
        assert blocks == [True, False, False]


@pytest.mark.parametrize("said", [True, False], ids=["named", "the instance's choice"])
@pytest.mark.parametrize("transfer", ["nixl", "nixl-push"])
async def test_decode_gets_the_rank_of_the_prefill(
    launch: Launch, transfer: str, said: bool
) -> None:
    settings: dict[str, Any] = {"on_prefill_failure": "fail"}
    settings |= {"ec_consumer_dp_size": 2} if said else {}
    async with strict(launch, transfer, prefill=2, decode=2, **settings) as (fleet, wire):
        if not said:
            wire.own_ranks = itertools.cycle("0011")

        async def asks(number: int) -> None:
            async with fleet.post(request(text(str(number)))) as reply:
                assert reply.status == 200, await reply.text()
                await reply.read()

        for number in range(8):
            await asks(number)
        await asyncio.gather(*map(asks, range(8, 20)))

        assert wire.fetched == 20
        told = [call.body["kv_transfer_params"] for one in fleet.decode for call in one.calls]
        assert len({params["remote_engine_id"] for params in told}) == 4
        # Concurrent prefill and decode need a known rank.
        at_once = any("remote_block_ids" not in params for params in told)
        assert at_once == (said and transfer == "nixl-push")


async def test_a_bootstrap_server_is_asked_once_for_many_requests(launch: Launch) -> None:
    async with strict(launch, "mooncake", prefill=2) as (fleet, wire):
        for _ in range(6):
            async with fleet.post(request(text())) as reply:
                assert reply.status == 200

        assert wire.queries == [1, 1]


async def test_the_engine_of_the_rank_that_prefills_is_named(launch: Launch) -> None:
    async with strict(launch, "mooncake", ec_consumer_dp_size=2) as (fleet, wire):
        wire.engines[0] = {"0": "engine-0-0", "1": "engine-0-1"}
        for _ in range(4):
            async with fleet.post(request(text())) as reply:
                assert reply.status == 200

        assert {call.headers["X-data-parallel-rank"] for call in fleet.p.calls} == {"0", "1"}


async def test_unconfigured_ranks_are_an_error_that_names_the_flag(
    launch: Launch,
) -> None:
    async with strict(launch, "mooncake", on_prefill_failure="fail") as (fleet, wire):
        wire.engines[0] = {"0": "engine-0-0", "1": "engine-0-1"}
        async with fleet.post(request(text())) as reply:
            said = await reply.json()

        assert (reply.status, reply.headers["x-epd-error"]) == (502, "prefill_ranks")
        assert "--ec-consumer-dp-size" in said["error"]["message"]


async def test_lmcache_without_addresses_sends_no_coordinates(launch: Launch) -> None:
    async with strict(launch, "none", kv_transfer="lmcache") as (fleet, wire):
        async with fleet.post(request(text())) as reply:
            assert reply.status == 200

        assert wire.fetched == 1
