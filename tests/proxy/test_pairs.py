"""KV and EC transfers, policies, topologies, balances and kinds of request, in all pairs.

Fake instances check each parameter that they receive. A few cases cover each pair of settings.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.metadata import entry_points
from itertools import product
from typing import Any

import pytest
from pydantic import ValidationError

from epd import ProxyConfig
from epd.transfer.registry import EC_TRANSFERS, KV_GROUP, KV_TRANSFERS
from tests.covering import Case, in_pairs
from tests.requests import Part, image, input_audio, text
from tests.support.fleet import Fleet, Launch
from tests.support.invariants import becomes
from tests.support.strict_fleet import ENCODERS, Body, Expected, StrictFleet, heard
from tests.support.strict_instance import WIRES

FACTORS: dict[str, Sequence[Any]] = {
    "kv_transfer": tuple(WIRES),
    "policy": (
        "encode_prefill_decode",
        "encode_pd",
        "prefill_decode",
        "pd_only",
        "prefill_local_decode_remote",
    ),
    "balance": ("affinity", "session", "round_robin", "least_load", "power_of_two"),
    "ec_transfer": tuple(EC_TRANSFERS),
    "encode": (0, 1, 2),
    "prefill": (0, 1, 2),
    "decode": (1, 2),
    "ranks": (1, 2),
    "items": (0, 1, 3),
    "endpoint": ("/v1/chat/completions", "/v1/completions"),
    "stream": (False, True),
    "conversation": (False, True),
}
REFUSALS = (
    "--ec-transfer mooncake needs --prefill-servers-urls disable (E+PD)",
    "prefill_local_decode_remote: needs local_prefill_url, or a prefill instance",
    "prefill_decode skips the encode stage, but with this --ec-transfer consumers wait for",
    "encode_prefill_decode sends media to encode instances, but there are none",
    "encode_pd sends media to encode instances, but there are none",
    "encode_prefill_decode: no request would be served, because there are only instances of these",
    "encode_pd: no request would be served, because there are only instances of these",
)
"""Messages with which the proxy rejects impossible combinations."""

NEEDS_PREFILL = {"encode_prefill_decode", "prefill_local_decode_remote"}
NEEDS_ENCODE = {"encode_prefill_decode", "encode_pd"}
LONG = "as many words as make more than a few tokens, which are worth being read: "
SESSION = {"X-Session-Id": "one"}


def configurable(case: Case) -> bool:
    """Return whether the proxy accepts the configuration, as far as the case is known."""
    policy, encode, prefill = (case.get(name) for name in ("policy", "encode", "prefill"))
    pushed = case.get("ec_transfer") == "mooncake"
    return not (
        (prefill == 0 and policy in NEEDS_PREFILL)
        or (encode == 0 and policy in NEEDS_ENCODE)
        or (prefill and policy == "encode_pd")
        or (pushed and (prefill or encode == 0 or policy == "prefill_decode"))
    )


def possible(case: Case) -> bool:
    """Return whether the case is possible; completions, for example, cannot contain media."""
    text_alone = case.get("endpoint") == "/v1/completions"
    return configurable(case) and not (text_alone and case.get("items"))


def handed_over(case: Case) -> bool:
    """Return whether prefill takes part; otherwise the case does not test its connector."""
    text_alone = case.get("policy") == "pd_only" and case.get("items") == 0
    return possible(case) and case.get("prefill") != 0 and not text_alone


def encoded(case: Case) -> bool:
    """Return whether encode takes part."""
    some = case.get("items") != 0 and case.get("encode") != 0
    return possible(case) and some and case.get("policy") != "prefill_decode"


def cases() -> list[Case]:
    """Return cases for all pairs, and again for those with prefill and for those with encode."""
    found = [one for kind in (possible, handed_over, encoded) for one in in_pairs(FACTORS, kind)]
    return [one for number, one in enumerate(found) if one not in found[:number]]


CASES = cases()


def named(case: Case) -> str:
    return "-".join(map(str, case.values()))


def settings_of(case: Case) -> dict[str, Any]:
    """Return the proxy's configuration without the addresses of instances."""
    policy, balance = case["policy"], case["balance"]
    settings: dict[str, Any] = {
        "kv_transfer": case["kv_transfer"],
        "ec_transfer": case["ec_transfer"],
        "ec_consumer_zmq_addrs": addresses(case),
        "ec_consumer_dp_size": case["ranks"],
        "encode_balance": balance,
        # No result depends on the speed of the machine.
        "conversation_budget_s": 30.0,
    }
    if balance != "affinity":
        settings |= {"prefill_balance": balance, "decode_balance": balance}
    if policy == "pd_only":
        return settings | {"skip_prefill_for_text": True}  # has priority over the usual ones
    return settings | {"policies": (policy,)}


def addresses(case: Case) -> tuple[str, ...]:
    """Return the addresses at which consumers receive pushes."""
    if case["ec_transfer"] != "mooncake":
        return ()
    return tuple(f"tcp://d:{19019 + n}" for n in range(case["decode"] * case["ranks"]))


def expected_of(case: Case) -> Expected:
    policy, items = case["policy"], case["items"]
    prefills = bool(case["prefill"] and (policy != "pd_only" or items))
    return Expected(
        kv_transfer=case["kv_transfer"],
        ec_transfer=case["ec_transfer"],
        encodes=bool(case["encode"]) and policy != "prefill_decode",
        prefills=prefills,
        reads_back=prefills and case["conversation"] and case["kv_transfer"] in {"nixl", "multi"},
        ranks=case["ranks"],
        addresses=addresses(case),
    )


class Client:
    """Client that sends the requests of one case, each with its own content."""

    def __init__(self, case: Case, fleet: Fleet, strict: StrictFleet) -> None:
        self._case = case
        self._fleet = fleet
        self._strict = strict

    async def ask(
        self, seed: int, before: Body | None = None, answer: str = ""
    ) -> tuple[Body, str]:
        """Send a request and check that the answer belongs to it; return both.

        Args:
            seed: number of the request.
            before: previous turn of the conversation.
            answer: answer to the previous turn.
        """
        case = self._case
        body = {
            "model": "m",
            **self._prompt(seed, before, answer),
            "stream": case["stream"],
            "max_tokens": 9,
            "temperature": 0.5,
            "seed": seed,
        }
        if case["stream"]:
            body |= {"stream_options": {"include_usage": False}, "min_tokens": 2}
        if case["conversation"]:
            body["conversation_id"] = before["conversation_id"] if before else f"talk {seed}"
        expected = self._strict.sends(body)
        url = self._fleet.url + case["endpoint"]
        async with self._fleet.http.post(url, json=body, headers=SESSION) as reply:
            raw = await reply.read()
            assert reply.status == 200, raw
            assert "x-epd-degraded" not in reply.headers
        said = heard(raw, stream=case["stream"])
        assert said == expected
        return body, said

    def _prompt(self, seed: int, before: Body | None, answer: str) -> Body:
        words = f"{LONG}{seed}"
        if self._case["endpoint"] == "/v1/completions":
            return {"prompt": f"{before['prompt']}{answer}{words}" if before else words}
        asked = {"role": "user", "content": [*self._media(seed), text(words)]}
        if before is None:
            return {"messages": [asked]}
        said = {"role": "assistant", "content": answer}
        return {"messages": [*before["messages"], said, asked]}

    def _media(self, seed: int) -> list[Part]:
        """Return no item, one that all requests share, or two equal ones with another between."""
        own, sound = image(b"picture %d" % seed), input_audio(b"sound %d" % seed)
        return [[], [image()], [own, sound, own]][min(self._case["items"], 2)]


@pytest.mark.parametrize("case", CASES, ids=named)
async def test_instances_get_valid_requests_and_clients_their_own_answers(
    launch: Launch, case: Case
) -> None:
    expected = expected_of(case)
    strict = StrictFleet(expected, case["prefill"], case["decode"])
    counts = {role: case[role] for role in ("encode", "prefill", "decode")}
    async with AsyncExitStack() as stack:
        own = of_connectors(await strict.begin(stack), case["prefill"])
        fleet = await stack.enter_async_context(launch(**counts, **settings_of(case), **own))
        strict.settle(fleet)
        client = Client(case, fleet, strict)
        first, answer = await client.ask(1)
        await asyncio.gather(client.ask(2), client.ask(3))
        await client.ask(4, first if case["conversation"] else None, answer)

        assert strict.wrong == []
        await becomes(lambda: strict.left, [])
        asked = [
            call for one in fleet.prefill for call in one.calls if call.path == case["endpoint"]
        ]
        assert len(asked) == (4 if expected.prefills else 0)
        assert sum(len(one.calls) for one in fleet.decode) == 4
        encoded = sum(len(one.calls) for one in fleet.encode)
        assert bool(encoded) == (expected.encodes and case["items"] > 0)
        assert len(strict.turns.read) == expected.reads_back
        if case["policy"] == "prefill_local_decode_remote":
            assert not any(one.calls for one in fleet.prefill[1:])
        if case["balance"] == "session" or case["conversation"]:
            assert strict.decoded[1] is strict.decoded[4]


async def test_the_proxy_starts_exactly_with_fleets_that_can_serve() -> None:
    rest = {name: values[0] for name, values in FACTORS.items()}
    transfers, policies, encoders, some = (
        *(FACTORS[name] for name in ("kv_transfer", "policy", "ec_transfer")),
        (0, 1),
    )
    refusals: set[str] = set()
    for transfer, prefill in product(transfers, some):
        async with AsyncExitStack() as stack:
            own = of_connectors(await WIRES[transfer](prefill, 1).begin(stack), prefill)
        for policy, encoder, encode in product(policies, encoders, some):
            chosen = {"policy": policy, "ec_transfer": encoder, "encode": encode}
            case = {**rest, **chosen, "kv_transfer": transfer, "prefill": prefill, "items": 1}
            refusal = refused(case, own)
            assert (refusal is None) == configurable(case), (case, refusal)
            refusals.add(refusal or "")

    assert {said for said in refusals if not any(said.startswith(one) for one in REFUSALS)} == {""}
    assert all(any(said.startswith(one) for said in refusals) for one in REFUSALS)


def refused(case: Case, own: Body) -> str | None:
    """Return the reason why the proxy rejects this configuration, or None if it accepts it."""
    urls = {
        f"{role}_servers_urls": tuple(f"http://{role}-{n}:8000" for n in range(case[role]))
        for role in ("encode", "prefill", "decode")
    }
    try:
        ProxyConfig(**urls, **settings_of(case), **own)
    except ValidationError as invalid:
        [error] = invalid.errors()
        return str(error["msg"]).removeprefix("Value error, ")
    return None


def of_connectors(own: Body, prefill: int) -> Body:
    """Return the connectors' configuration; without prefill there are no KV addresses."""
    return own if prefill else {name: own[name] for name in own if not name.endswith("_kv_addrs")}


def test_each_value_of_each_factor_is_in_a_case() -> None:
    """The exclusions leave out no value, and the fake instances leave out no transfer."""
    for name, values in FACTORS.items():
        assert {case[name] for case in CASES} == {*values}
    plugins = entry_points(group=KV_GROUP).names
    assert {*WIRES} == {*KV_TRANSFERS, *plugins}
    assert ENCODERS.keys() == EC_TRANSFERS.keys()
