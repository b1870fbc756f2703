"""Chaos test: the proxy under random faults of everything around it, and the rules to judge."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from scripts.chaos_faults import Fault, cut_by, excused, plan
from scripts.chaos_fleet import ROLE_KINDS, Breakable, RedisStore
from scripts.chaos_load import Outcome, Result
from scripts.chaos_proxy import Cut
from scripts.chaos_report import Figures, Left, figures

ROOT = Path(__file__).resolve().parents[2]


class Target:
    def __init__(self, role: str, kinds: tuple[str, ...] = ("kill",)) -> None:
        self.name, self.role, self.kinds = f"{role}-1", role, kinds

    broken = RedisStore.broken


@pytest.mark.full
@pytest.mark.parametrize(
    ("topology", "store", "seconds", "workers"),
    [("2e2p2d", "redis", 20, 1), ("2e2pd", "file", 20, 1), ("2e2p2d", "redis", 20, 3)],
)
def test_proxy_under_random_faults_loses_no_request_and_leaks_nothing(
    topology: str, store: str, seconds: int, workers: int
) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "chaos.py"), "--seed", "1"]
    flags = ["--topology", topology, "--store", store, "--seconds", str(seconds)]
    flags += ["--workers", str(workers)]
    ran = subprocess.run(
        [*command, *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=seconds + 240,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    seen = orjson.loads(ran.stdout)
    assert seen["broken"] == []
    assert seen["outcomes"]["right"] > 0
    assert sum(seen["faults"].values()) > seconds / 10
    assert seen["faults"].get("worker kill", 0) >= workers - 1


def test_chaos_faults_depend_only_on_the_seed() -> None:
    targets: list[Breakable] = [
        Target(role.value, tuple(kinds)) for role, kinds in ROLE_KINDS.items()
    ]
    first, again, other = (
        plan(targets, random.Random(seed), 60.0)  # noqa: S311
        for seed in (1, 1, 2)
    )

    assert first == again
    assert first != other


def outcome(result: Result, status: int = 200, slug: str = "") -> Outcome:
    return Outcome("text", result == "broken off", 10.0, 12.0, result, status, slug)


@pytest.mark.parametrize(
    ("ended", "fault", "may_be"),
    [
        (outcome("error", 502, "decode_failed"), Fault("kill", "decode", "d", 9.0, 11.0), True),
        (outcome("error", 502, "decode_failed"), Fault("kill", "decode", "d", 1.0, 2.0), False),
        (outcome("error", 502, "decode_failed"), Fault("sick", "decode", "d", 9.0, 11.0), False),
        (outcome("error", 504, "prefill_timeout"), Fault("hang", "prefill", "p", 9.0), True),
        (outcome("error", 504, "prefill_timeout"), Fault("hang", "decode", "d", 9.0), False),
        (outcome("error", 500, "decode_rejected"), Fault("kill", "prefill", "p", 9.0), True),
        (outcome("error", 502, "encode_failed"), Fault("kill", "encode", "e", 9.0), False),
        (outcome("error", 502, "decode_failed"), Fault("kill", "store", "store", 9.0), False),
        (outcome("error", 500, "internal_error"), Fault("kill", "decode", "d", 9.0), False),
        (outcome("error", 502, "decode_failed"), Fault("kill", "worker", "worker 2", 9.0), False),
        (outcome("error", 503, "suspected_fatal"), Fault("kill", "decode", "d", 9.0), False),
        (outcome("broken off", 502), Fault("break", "prefill_decode", "pd", 9.0), True),
        (outcome("broken off", 504), Fault("break", "prefill_decode", "pd", 9.0), False),
    ],
)
def test_chaos_report_excuses_errors_with_an_active_cause(
    ended: Outcome, fault: Fault, may_be: bool
) -> None:
    faults = [fault] if fault.felt(ended) else []

    assert excused(ended, faults) is may_be


def test_chaos_report_excuses_suspected_fatal_after_two_deaths() -> None:
    rejected = outcome("error", 503, "suspected_fatal")
    of_encode, of_decode = (
        Fault("kill", "encode", "e", 3.0, 6.0),
        Fault("reset", "decode", "d", 9.0),
    )

    assert of_encode.felt(rejected)
    assert excused(rejected, [of_encode, of_decode])
    assert not excused(rejected, [of_encode, of_encode])


@pytest.mark.parametrize(
    ("ended", "cut", "may_be"),
    [
        (Outcome("text", False, 10.0, 12.0, "cut off", port=5), Cut(11.0, frozenset({5})), True),
        (Outcome("text", False, 10.0, 12.0, "cut off", port=6), Cut(11.0, frozenset({5})), False),
        (Outcome("text", False, 10.0, 12.0, "cut off", port=5), Cut(9.0, frozenset({5})), False),
        (Outcome("text", False, 10.0, 12.0, "lost", port=5), Cut(11.0, frozenset({5})), False),
    ],
)
def test_the_kill_of_a_worker_excuses_only_the_requests_that_it_had(
    ended: Outcome, cut: Cut, may_be: bool
) -> None:
    assert cut_by(ended, [cut]) is may_be


def seen(*outcomes: Outcome, left: Left) -> Figures:
    memory = [(0.0, {PROXY: 60.0}), (1.0, {PROXY: 61.0})]
    return figures(outcomes, [], [], memory, left)


PROXY = ("proxy", 7)
ALL_WELL = Left(
    recovered=True,
    idle=(),
    open=0,
    under_way=(),
    claims=0,
    kept=3,
    kept_later=3,
    fds={"proxy": (30, 30), "worker 1": (30, 40)},
)


@pytest.mark.parametrize(
    ("ended", "left", "broken"),
    [
        ("right", ALL_WELL, []),
        ("left", ALL_WELL, []),
        ("wrong", ALL_WELL, ["wrong answers"]),
        ("lost", ALL_WELL, ["requests lost"]),
        ("misshapen", ALL_WELL, ["answers in no shape"]),
        ("error", ALL_WELL, ["errors not excused"]),
        ("cut off", ALL_WELL, ["requests lost"]),
        ("right", replace(ALL_WELL, open=1), ["requests left upstream"]),
        ("right", replace(ALL_WELL, fds={"worker 2": (30, 90)}), ["descriptors left"]),
        ("right", replace(ALL_WELL, recovered=False), ["does not serve again"]),
        ("right", replace(ALL_WELL, idle=["a"]), ["instances or workers not asked again"]),
        ("right", replace(ALL_WELL, under_way=["a"]), ["places or bytes left"]),
        ("right", replace(ALL_WELL, claims=1), ["claims left"]),
        ("right", replace(ALL_WELL, kept_later=4), ["KV caches left by good requests"]),
        ("right", replace(ALL_WELL, processes=["worker 1"]), ["processes left"]),
        ("right", replace(ALL_WELL, surprises=["Traceback"]), ["surprises in the log"]),
    ],
)
def test_chaos_run_fails_by_any_violated_invariant(
    ended: Result, left: Left, broken: list[str]
) -> None:
    run = seen(outcome(ended), left=left)

    assert run.broken == broken
    assert orjson.loads(run.to_json())["outcomes"] == {outcome(ended).kind: 1}
