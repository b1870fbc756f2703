"""Results of checking clients' keys at the instances, and how long they are cached."""

from collections.abc import Mapping

import pytest

from epd.errors import ProxyError, UpstreamFailed, UpstreamRejected
from epd.server.key_judge import MAX_KEYS, KeyJudge


class Asked:
    """Instance with a fixed answer that counts its requests."""

    def __init__(self, error: ProxyError | None = None) -> None:
        self.error = error
        self.times = 0

    async def __call__(self, headers: Mapping[str, str]) -> None:
        self.times += 1
        if self.error is not None:
            raise self.error


def bearer(key: object) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def rejected(status: int) -> UpstreamRejected:
    return UpstreamRejected(status, b"", stage="decode", headers={})


async def test_an_accepted_key_is_asked_about_once() -> None:
    asked = Asked()
    judge = KeyJudge(asked)
    for headers in (bearer("a"), bearer("a"), {}, {}, bearer("b"), bearer("\udcff")):
        await judge.check(headers)

    assert asked.times == 4


async def test_an_accepted_key_is_asked_about_again_after_its_time() -> None:
    asked = Asked()
    judge = KeyJudge(asked, accepted_s=0.0)
    for _ in range(3):
        await judge.check(bearer("a"))

    assert asked.times == 3


@pytest.mark.security("S2")
@pytest.mark.parametrize("error", [rejected(401), rejected(403), rejected(500), UpstreamFailed("")])
async def test_a_rejected_key_is_not_cached(error: ProxyError) -> None:
    asked = Asked(error)
    judge = KeyJudge(asked)
    for _ in range(2):
        with pytest.raises(type(error)):
            await judge.check(bearer("a"))

    assert asked.times == 2


async def test_an_instance_without_such_a_route_has_let_the_key_in() -> None:
    await KeyJudge(Asked(rejected(404))).check(bearer("a"))


async def test_at_most_so_many_keys_are_remembered() -> None:
    asked = Asked()
    judge = KeyJudge(asked)
    for number in range(MAX_KEYS):
        await judge.check(bearer(number))
    await judge.check(bearer(0))
    assert asked.times == MAX_KEYS

    await judge.check(bearer("one more"))
    await judge.check(bearer(1))
    assert asked.times == MAX_KEYS + 1

    await judge.check(bearer(0))
    assert asked.times == MAX_KEYS + 2
