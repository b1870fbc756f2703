"""Judgement of KV transfers, on metrics pages of real engines.

`nixl_metrics` has the lines about transfers of a decode engine of vLLM 0.32 on the CPU. Its prefill
engine was in another network namespace behind `tc qdisc ... tbf rate 1600mbit` (0.2 GB/s,
`UCX_TLS=tcp`). The pages are those before and after a prompt of 20 tokens, one of 2,000 tokens, and
one of 2,000 tokens beside four other requests (three of 60 tokens, one of 700).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epd.routing.instances import Instance, Role
from epd.tools.doctor.findings import Finding, Verdict
from epd.tools.doctor.kv_bandwidth import (
    MIN_BYTES,
    PairFacts,
    Transfers,
    Window,
    judge_pair,
    read_transfers,
)

PAGES = Path(__file__).with_name("nixl_metrics")
P, D = Instance(Role.PREFILL, "http://h:1"), Instance(Role.DECODE, "http://h:2")
RATE_BYTES_PER_S = 200e6
"""Rate of the recorded link."""

BLOCK_BYTES = 8 * 2**20
LARGE_BYTES = 16 * BLOCK_BYTES


def recorded(before: str, after: str, tokens: int) -> Window:
    pages = [(PAGES / f"{name}.txt").read_bytes() for name in (before, after)]
    earlier, later = map(read_transfers, pages)
    assert earlier is not None
    assert later is not None
    return Window(later.since(earlier), tokens)


SMALL = recorded("before_small", "after_small", 20)
QUIET = recorded("after_small", "after_large", 2000)
BUSY = recorded("before_busy", "after_busy", 2000)


def window(*seconds: float, size: float = 1e9) -> Window:
    """Return transfers of these durations and of this size together."""
    return Window(Transfers(len(seconds), size, sum(seconds), 1000), 1000)


PROMPT = window(0.01, size=1e6)
"""A small trial."""


def judged(large: Window, small: Window = PROMPT, **changes: Any) -> Finding:
    return judge_pair(replace(PairFacts(P, D, small, large), **changes))


def test_a_recorded_transfer_has_the_bandwidth_of_its_link() -> None:
    assert QUIET.transfers.bytes == LARGE_BYTES
    assert LARGE_BYTES / QUIET.mean_s == pytest.approx(RATE_BYTES_PER_S, rel=0.05)
    assert SMALL.transfers.bytes == BLOCK_BYTES


@pytest.mark.fault(109)
def test_a_slow_pair_of_one_host_is_a_warning_with_what_to_check() -> None:
    finding = judged(QUIET, small=SMALL)

    assert finding.verdict is Verdict.WARN
    assert finding.subject == "KV http://h:1 -> http://h:2"
    assert finding.seen.startswith("0.2 GB/s (134 MB in 683 ms), delay ")
    for word in ("UCX_TLS", "UCX_NET_DEVICES", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "PID", "GPUDirect"):
        assert word in finding.advice
    assert "UCX_LOG_LEVEL=info UCX_PROTO_INFO=y" in finding.advice
    assert "`remote memory read` (`write`)" in finding.advice


@pytest.mark.fault(109)
def test_a_trial_beside_other_transfers_has_no_figure() -> None:
    finding = judged(BUSY, small=SMALL)

    assert finding.verdict is Verdict.OK
    assert finding.seen.startswith("transfers of other requests took place at the same time")
    assert "epd_kv_transfer_bytes_per_second" in finding.seen


def test_transfers_that_prefill_counts_are_added() -> None:
    page = (PAGES / "after_large.txt").read_bytes()
    of_decode, of_prefill = read_transfers(page), read_transfers(b"", page)

    assert of_decode is not None
    assert of_prefill == of_decode._replace(tokens=0)


@pytest.mark.parametrize(
    ("seconds", "verdict"), [((0.19,), Verdict.OK), ((0.25,), Verdict.WARN), ((6.0,), Verdict.WARN)]
)
def test_five_gigabytes_per_second_are_enough(seconds: tuple[float], verdict: Verdict) -> None:
    assert judged(window(*seconds)).verdict is verdict


@pytest.mark.parametrize(
    ("large", "changes", "reason"),
    [
        (window(1.0), {"decode": Instance(Role.DECODE, "http://g:2")}, "different hosts"),
        (window(1.0, size=MIN_BYTES - 1), {}, "less than 64 MB"),
        (window(0.21), {"small": window(0.02, size=1e6)}, "the delay is most"),
    ],
)
def test_a_figure_that_decides_nothing_has_no_verdict(
    large: Window, changes: dict[str, Any], reason: str
) -> None:
    finding = judged(large, **changes)

    assert finding.verdict is Verdict.OK
    assert "no verdict: " in finding.seen
    assert reason in finding.seen
    assert "GB/s" in finding.seen


def test_transfers_of_several_ranks_at_once_are_one_bandwidth() -> None:
    four = window(0.1, 0.1, 0.1, 0.1, size=4e9)

    finding = judged(four, small=window(*[0.001] * 4, size=4e6))
    assert finding.seen.startswith("40 GB/s (4000 MB in 100 ms), delay 1 ms")


def test_a_page_without_a_nixl_connector_has_no_transfers() -> None:
    assert read_transfers(b"# TYPE x gauge\nx 1\n") is None
    assert read_transfers(b'vllm:nixl_xfer_time_seconds_bucket{le="0.1"} x\n') is None


def test_engines_of_a_page_are_added() -> None:
    page = (PAGES / "after_large.txt").read_bytes()
    one, two = read_transfers(page), read_transfers(page + page.replace(b'"0"', b'"1"'))

    assert one is not None
    assert two is not None
    assert [*two] == [2 * value for value in one]
