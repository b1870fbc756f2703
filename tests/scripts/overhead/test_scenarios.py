from base64 import b64decode
from itertools import islice

import orjson
import pytest

from scripts.overhead.scenarios import SCENARIOS, Bodies, Scenario

SMALL = [one for one in SCENARIOS if one.picture_bytes < 5_000_000]


def pictures(body: bytes) -> list[bytes]:
    content = orjson.loads(body)["messages"][0]["content"]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    return [b64decode(url.partition(",")[2], validate=True) for url in urls]


@pytest.mark.parametrize("scenario", SMALL, ids=lambda one: one.name)
def test_a_body_matches_its_scenario(scenario: Scenario) -> None:
    body = next(iter(Bodies(scenario, 1)))
    asked = orjson.loads(body)

    assert asked.get("stream", False) == bool(scenario.chunks)
    assert asked["max_tokens"] == max(1, scenario.chunks)
    if scenario.pictures:
        assert [len(it) for it in pictures(body)] == [scenario.picture_bytes] * scenario.pictures


def test_no_two_pictures_are_the_same_where_none_is_reused() -> None:
    scenario = Scenario("x", "x", pictures=2, picture_bytes=4000)
    first = [it for body in islice(Bodies(scenario, 1), 50) for it in pictures(body)]
    other = [it for body in islice(Bodies(scenario, 2), 50) for it in pictures(body)]

    assert len({*first, *other}) == 200


def test_pictures_are_reused_at_the_rate_of_the_scenario() -> None:
    scenario = Scenario("x", "x", pictures=1, picture_bytes=4000, reuse=0.9)
    sent = [pictures(body)[0] for body in islice(Bodies(scenario, 1), 2000)]

    assert 150 < len(set(sent)) < 250
