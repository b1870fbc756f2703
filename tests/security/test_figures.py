"""`/metrics` contains totals and no data about individual clients."""

import re
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from prometheus_client.parser import text_string_to_metric_families

from epd.conversations.conversations import RESULTS
from epd.policies.registry import BUILTIN
from epd.version import __version__
from tests.requests import image, request
from tests.security.wire import ask
from tests.support.clients import ALICE, bearer
from tests.support.fake_instance import refuses
from tests.support.fleet import Fleet, Launch

LABELS = {
    "path": re.compile(r"/[a-z1/_.]+(\{uuid\})?|unknown"),
    "status": re.compile(r"[1-5]\d\d"),
    "model_name": re.compile("m|other|"),
    "stage": re.compile("store|queue|encode|prefill|decode|release|proxy|answer"),
    "failed": re.compile("true|false"),
    "result": re.compile("hit|encoded|local|ok|timeout|error|skipped|" + "|".join(RESULTS)),
    "kind": re.compile("(encode|prefill)-local"),
    "policy": re.compile("|".join(BUILTIN)),
    "reason": re.compile("[a-z_]+"),
    "form": re.compile("metadata|raw"),
    "role": re.compile("encode|prefill|decode|prefill_decode"),
    "state": re.compile("healthy|ejected|down|trial"),
    "instance": re.compile(r"http://127\.0\.0\.1:\d+"),
    "operation": re.compile("[a-z_]+"),
    "task": re.compile("[a-z_]+"),
    "circuit": re.compile("store_(questions|changes)"),
    "version": re.compile(re.escape(__version__)),
    "le": re.compile(r"[\d.]+|\+Inf"),
}
"""All labels, and the values that each may have."""


async def labels(fleet: Fleet) -> set[tuple[str, str]]:
    async with fleet.http.get(f"{fleet.url}/metrics") as reply:
        page = await reply.text()
    return {
        pair
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        for pair in sample.labels.items()
    }


@pytest.mark.security("S20")
async def test_labels_contain_no_values_chosen_by_clients(launch: Launch, keys: Path) -> None:
    async with launch(api_keys_file=keys) as fleet:
        await labels(fleet)
        for number in range(30):
            headers = bearer(ALICE).items()
            for line in (
                f"GET /alice-{number} HTTP/1.1",
                f"GET /v1/models?{number} HTTP/1.1",
                f"DELETE /v1/media/cat-{number}?model=m{number} HTTP/1.1",
                f"METHOD{number} /v1/models HTTP/1.1",
                f"OPTIONS /v1/{number} HTTP/1.1",
            ):
                await ask(fleet.url, line, headers)
            picture = image(b"cat", uuid=f"cat-{number}")
            await fleet.chat(request(picture, model=f"m{number}"), bearer(ALICE))
        fleet.d.chat = refuses(599)
        await fleet.chat(request(image()), bearer(ALICE))
        found = await labels(fleet)

        assert [pair for pair in found if LABELS[pair[0]].fullmatch(pair[1]) is None] == []
        assert {value for name, value in found if name == "path"} <= {
            "unknown",
            "/metrics",
            "/v1/models",
            "/v1/media/{uuid}",
            "/v1/chat/completions",
        }
        assert ("status", "599") in found


@pytest.mark.security("S22")
def test_aiohttp_is_as_new_as_vllm_asks_for() -> None:
    [aiohttp] = [one for one in requires("epd-proxy") or [] if one.startswith("aiohttp<")]

    for old in ("3.13.4", "3.14.3"):
        assert not Requirement(aiohttp).specifier.contains(old)
