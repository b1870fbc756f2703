"""Row 77: an engine that hangs while its `/health` answers."""

from typing import Any

import pytest

from tests.requests import request, text
from tests.support.fake_instance import hangs
from tests.support.fleet import Launch

pytestmark = pytest.mark.fault(77)

ROUNDS, AT_ONCE = 12, 6


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_hanging_engine_gets_no_more_requests_and_no_request_fails(
    launch: Launch, role: str
) -> None:
    limits: Any = {"first_byte_timeout_s": 0.5, "prefill_timeout_s": 0.5}
    groups = {"prefill": 0, "decode": 2} if role == "decode" else {"prefill": 2, "decode": 1}
    async with launch(**groups, **limits) as fleet:
        instances = fleet.decode if role == "decode" else fleet.prefill
        hanging = instances[0]
        hanging.chat = hangs
        met = []
        for number in range(ROUNDS * AT_ONCE):
            body = request(text(f"{number}"), stream=True)
            async with fleet.post(body) as reply:
                assert reply.status == 200
                await reply.read()
            met.append(len(hanging.calls))

        assert [one.state for one in fleet.events.changes] == ["ejected"]
        # Some requests detect it. No request meets it afterwards.
        assert met[-1] == met[len(met) // 2] <= 4
