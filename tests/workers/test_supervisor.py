"""Worker processes: forks of the first process, and what they leave to their replacement."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from epd.config import ProxyConfig
from epd.workers.worker import WorkerSlot, shared_state


@contextmanager
def supervised(worker_main: str) -> Iterator[subprocess.Popen[str]]:
    """Run a first process with two workers that run a coroutine of `tests.support.supervised`."""
    command = [sys.executable, "-m", "tests.support.supervised", worker_main]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def reports() -> list[dict[str, Any]]:
    with supervised("reports") as process:
        assert process.stdout is not None
        found = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.terminate()
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "worker died" not in log
    return sorted(found, key=lambda report: report["worker"])


def test_a_worker_is_a_fork_without_the_state_of_the_first_process() -> None:
    first, second = reports()

    for report in (first, second):
        assert report["leads_its_group"]
        assert report["blocked"] == []
        assert report["ignored"] == ["SIGINT", "SIGTERM", "SIGHUP"]
    assert first["request_id"] != second["request_id"]
    assert (first["name"], second["name"]) == ("epd worker 1", "epd worker 2")


def test_a_worker_has_no_descriptors_of_another_one() -> None:
    """A copy of a pipe would keep the other worker running; one of a socket loses connections."""
    first, second = (set(report["pipes_and_sockets"]) for report in reports())

    assert len(first) > 1
    assert not first & second


def ended(worker_main: str) -> list[dict[str, Any]]:
    """Return the log up to the end of both workers. The first process goes on, until SIGTERM."""
    lines: list[dict[str, Any]] = []
    with supervised(worker_main) as process:
        assert process.stderr is not None
        while [line["event"] for line in lines].count("worker died") < 2:
            lines.append(json.loads(process.stderr.readline()))
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
    return lines


def test_an_exception_in_a_worker_ends_only_that_process() -> None:
    lines = ended("fails")
    failed = [line for line in lines if line["event"] == "worker failed"]

    assert {line["worker"] for line in failed} == {1, 2}
    assert all("ValueError: a broken worker" in line["exception"] for line in failed)
    assert not any("supervise(" in line["exception"] for line in failed)
    assert {line["of"] for line in lines if line["event"] == "worker died"} == {"exit code 1"}


def test_a_worker_writes_its_waiting_lines_before_it_ends() -> None:
    lines = ended("ends")

    assert {line["worker"] for line in lines if "waits" in line} == {1, 2}
    assert {line["of"] for line in lines if line["event"] == "worker died"} == {"exit code 0"}


@pytest.mark.fault(118)
def test_a_worker_that_hangs_is_killed_and_replaced_before_and_after_sigterm() -> None:
    """Each first worker hangs at once, the second one at the order to stop."""
    lines: list[dict[str, Any]] = []
    with supervised("hangs") as process:
        assert process.stderr is not None
        while [line["event"] for line in lines].count("worker hangs: killing it") < 2:
            lines.append(json.loads(process.stderr.readline()))
        process.terminate()
        lines += map(json.loads, process.communicate(timeout=60)[1].splitlines())

    assert process.returncode == 0
    deaths = [line for line in lines if line["event"] == "worker died"]
    assert {(line["worker"], line["of"]) for line in deaths} == {(1, "signal 9")}
    hung = [line["worker"] for line in lines if line["event"] == "worker hangs: killing it"]
    assert hung[:2] == [1, 1]
    assert hung.count(2) == 1


def test_a_dead_worker_leaves_no_requests_of_tenants() -> None:
    urls = ("http://127.0.0.1:1",)
    config = ProxyConfig(encode_servers_urls=urls, decode_servers_urls=urls, workers=2)
    with shared_state(config) as shared:
        uses = [shared.ledger.use_of(number, "alice") for number in (0, 1)]
        for use in uses:
            use.begin_request()
        assert [use.total_requests() for use in uses] == [2, 2]

        WorkerSlot(2, (), shared).bury_pages()

        assert uses[0].total_requests() == 1
