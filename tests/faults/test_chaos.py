"""The proxy while everything around it fails at random, and the rules by which that is judged."""

import os
import random
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from scripts.chaos_faults import Fault, excused, excused_by_a_kill, plan
from scripts.chaos_fleet import ROLE_KINDS, Breakable, RedisStore
from scripts.chaos_load import Outcome, Result
from scripts.chaos_report import Figures, Left, figures

ROOT = Path(__file__).resolve().parents[2]


class Target:
    def __init__(self, role: str, kinds: tuple[str, ...] = ("kill",)) -> None:
        self.name, self.role, self.kinds = f"{role}-1", role, kinds

    broken = RedisStore.broken


@pytest.mark.parametrize(
    ("topology", "store", "seconds"), [("2e2p2d", "redis", 30), ("2e2pd", "file", 20)]
)
def test_nothing_is_lost_wrong_or_left_behind(topology: str, store: str, seconds: int) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "chaos.py"), "--json", "--seed", "1"]
    flags = ["--topology", topology, "--store", store, "--seconds", str(seconds)]
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


def test_what_is_broken_depends_on_the_seed_alone() -> None:
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
        (outcome("broken off", 502), Fault("break", "prefill_decode", "pd", 9.0), True),
        (outcome("broken off", 504), Fault("break", "prefill_decode", "pd", 9.0), False),
    ],
)
def test_an_error_is_excused_by_what_may_cause_it(
    ended: Outcome, fault: Fault, may_be: bool
) -> None:
    faults = [fault] if fault.felt(ended) else []

    assert excused(ended, faults) is may_be


def test_one_kill_excuses_no_request_whose_answer_had_not_begun() -> None:
    first, second = Fault("kill", "decode", "d1", 9.0), Fault("kill", "decode", "d2", 11.0)
    beside = Fault("kill", "prefill", "p1", 9.6)
    refused, broken = outcome("error", 502, "decode_failed"), outcome("broken off", 502)

    assert not excused_by_a_kill(refused, [first, beside])
    assert excused_by_a_kill(refused, [first, second])
    assert excused_by_a_kill(broken, [first])
    assert not excused_by_a_kill(broken, [])


def seen(*outcomes: Outcome, left: Left) -> Figures:
    return figures(outcomes, [], excused, [(0.0, 60.0), (1.0, 61.0)], left)


ALL_WELL = Left(recovered=True, idle=(), open=0, kept=0, fds=(30, 30))


@pytest.mark.parametrize(
    ("ended", "left", "broken"),
    [
        ("right", ALL_WELL, []),
        ("left", ALL_WELL, []),
        ("wrong", ALL_WELL, ["wrong answers"]),
        ("lost", ALL_WELL, ["requests lost"]),
        ("misshapen", ALL_WELL, ["answers in no shape"]),
        ("error", ALL_WELL, ["errors not excused"]),
        ("right", Left(True, (), 1, 0, (30, 30)), ["requests left upstream"]),
        ("right", Left(True, (), 0, 0, (30, 90)), ["descriptors left"]),
        ("right", Left(False, (), 0, 0, (30, 30)), ["does not serve again"]),
        ("right", Left(True, ("decode-1",), 0, 0, (30, 30)), ["instances not asked again"]),
    ],
)
def test_a_run_fails_by_what_it_must_not_show(ended: Result, left: Left, broken: list[str]) -> None:
    run = seen(outcome(ended), left=left)

    assert run.broken == broken
    assert orjson.loads(run.to_json())["outcomes"] == {outcome(ended).kind: 1}
