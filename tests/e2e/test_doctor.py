"""`epd doctor` in front of real engines."""

import re

from epd.config import ProxyConfig
from epd.routing.instances import Role
from epd.tools.doctor.examination import examine
from epd.tools.doctor.findings import Finding, Verdict
from tests.e2e.served import READ, Served, metric

MEASURED = re.compile(r"[\d.e-]+ GB/s \([\d.]+ MB in [\d.]+ ms\), delay [\d.]+ ms \(no verdict: ")


async def examined(stack: Served) -> list[Finding]:
    urls = {role: tuple(engine.url for engine in stack.stack.of_role(role)) for role in Role}
    instances = {
        "encode_servers_urls": urls[Role.ENCODE],
        "prefill_servers_urls": urls[Role.PREFILL],
        "decode_servers_urls": urls[Role.DECODE] or urls[Role.PREFILL_DECODE],
    }
    if not urls[Role.ENCODE]:
        instances = {"servers_urls": urls[Role.PREFILL_DECODE]}
    config = ProxyConfig(
        host="127.0.0.1",
        ec_store=stack.stack.store,
        ec_store_budget_s=5,
        max_requests=16,
        media_fetch="proxy",
        allowed_media_domains=("example.com",),
        **instances,
    )

    return await examine(config, requests=True)


async def test_the_doctor_finds_nothing_to_mend_in_a_real_fleet(stack: Served) -> None:
    findings = await examined(stack)

    unlimited = "Redis has no maxmemory"  # as the servers of these tests
    bad = [one for one in findings if one.verdict is not Verdict.OK]
    assert [one for one in bad if not one.seen.startswith(unlimited)] == []
    seen = {one.seen for one in findings}
    assert "finds encoder outputs by their key alone" in seen
    assert "has the entry that an instance just wrote" in seen
    prefills = bool(stack.stack.of_role(Role.PREFILL))
    assert ("hands over its KV cache" in seen) == prefills
    measured = [one for one in findings if one.subject.startswith("KV ")]
    assert len(measured) == prefills
    assert all(MEASURED.match(one.seen) for one in measured)


async def test_the_doctor_makes_prefill_read_blocks_of_decode(stack: Served) -> None:
    before = metric(stack.stack.of_role(Role.PREFILL)[0], READ)
    findings = await examined(stack)

    assert [one for one in findings if one.verdict is not Verdict.OK] == []
    assert "reads the blocks that decode keeps of a conversation's previous turn" in {
        one.seen for one in findings
    }
    assert metric(stack.stack.of_role(Role.PREFILL)[0], READ) > before
