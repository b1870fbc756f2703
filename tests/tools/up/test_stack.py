"""Restarts of the store's service."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest

from epd.tools.up import stack
from epd.tools.up.plan import STORE, FleetPlan
from epd.tools.up.process import ProcessDied


class Stopped(Exception):
    """Raised in place of the last restart."""


@pytest.mark.parametrize(
    ("lifetime_s", "delays"), [(0, ["1", "2", "4", "8"]), (3600, ["1", "1", "1", "1"])]
)
def test_the_delay_of_a_restart_begins_again_after_a_long_run(
    tmp_path: Path, lifetime_s: float, delays: list[str]
) -> None:
    now_s, reports = [0.0], list[str]()

    class Service:
        name = STORE

        def __init__(self) -> None:
            self.started_s = now_s[0]

        def check_alive(self) -> None:
            if now_s[0] - self.started_s >= lifetime_s:
                raise ProcessDied("ended")

        def kill(self) -> None:
            pass

    def report(line: str) -> None:
        reports.extend([line.split()[-2]] if "again" in line else [])
        if len(reports) == len(delays):
            raise Stopped

    def sleep(delay_s: float) -> None:
        now_s[0] += delay_s

    server = SimpleNamespace(name=STORE, url="")
    plan: Any = SimpleNamespace(missing_role=lambda _: None, servers=lambda: [server])
    fleet = stack.Fleet(cast("FleetPlan", plan), tmp_path, report=report)
    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    start = patch.object(stack.Fleet, "launch", lambda *_: Service())
    with patch.object(stack, "time", clock), start:
        vars(fleet)["_processes"].append(Service())
        with pytest.raises(Stopped):
            fleet.watch()

    assert reports == delays
