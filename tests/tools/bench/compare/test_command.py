"""`epd bench compare` with fake fleets, its figures and its verdict."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from epd.__main__ import main
from epd.tools.bench.answer import Answer, read_answer
from epd.tools.bench.compare.arms import gpus_of
from epd.tools.bench.compare.command import write_results
from epd.tools.bench.compare.figures import Figures, figures_of
from epd.tools.bench.compare.processors import CpuTime
from epd.tools.bench.compare.report import ArmResult, Results
from epd.tools.bench.compare.verdict import verdict
from epd.tools.bench.compare.workloads import (
    SCALES,
    WORKLOADS,
    Question,
    Workload,
    window,
)

PREFILL = ["--prefill-servers-urls", "disable"]
SMALL = SCALES["small"]
MEAN = "geometric mean over the workloads of requests/s and TTFT"


def figures(rate: float = 10.0, ttft: float = 100.0, at_once: int = 4, **more: Any) -> Figures:
    given = Figures(
        at_once=at_once,
        asked=8,
        failed=0,
        seconds=8 / rate,
        requests_per_s=rate,
        output_tokens_per_s=8 * rate,
        prompt_tokens=100,
        ttft_ms={"": ttft},
        ttft_p50_ms=ttft,
        ttft_p99_ms=2 * ttft,
        items={},
        distinct=8,
        compared=8,
        equal=8,
        farthest=0.0,
        others=0.0,
        notes=[],
    )
    return replace(given, **more)


def said(**measured: Mapping[str, Figures]) -> list[str]:
    return [*verdict(measured)]


def test_verdict_names_the_faster_arm_by_how_much_and_where_it_loses() -> None:
    plain = {"pool": figures(), "unique": figures()}
    fast = {"pool": figures(20.0, 50.0), "unique": figures(9.0, 110.0)}
    assert said(plain=plain, cache=plain, epd=fast) == [
        f"Run `epd`: 1.35x of plain vLLM ({MEAN}).",
        "pool: `epd`, 2.00x requests/s, 0.50x TTFT.",
        "unique: `plain`.",
        "`epd` loses in: unique, 0.90x requests/s, 1.10x TTFT.",
    ]


def test_verdict_names_plain_vllm_where_it_is_better() -> None:
    [first, *_] = said(plain={"pool": figures()}, cache={"pool": figures(8.0, 125.0)})
    assert first.startswith("Plain vLLM is better here: the best other arm, `cache`, is 0.80x")


def test_verdict_takes_a_small_gain_for_noise() -> None:
    [first, *_] = said(plain={"pool": figures()}, cache={"pool": figures(10.3, 99.0)})
    assert first.startswith("Run plain vLLM, which is simpler")


def test_verdict_recommends_no_arm_that_fails_requests() -> None:
    fast = {"pool": figures(50.0, failed=2)}
    [first, second, *_] = said(plain={"pool": figures()}, epd=fast, cache={"pool": figures(20.0)})
    assert first == "`epd` cannot be recommended: 2 of its requests failed."
    assert second.startswith("Run `cache`")


def test_verdict_distrusts_figures_of_a_busy_machine() -> None:
    busy = {"pool": figures(5.0, 200.0, others=0.4)}
    [first, second, *_] = said(plain=busy, cache={"pool": figures(others=0.02)})
    assert first.startswith("Do not trust these figures: other programs used 40% (`plain`), 2% (")
    assert second.startswith("Run `cache`")


def test_cpu_time_of_children_is_not_that_of_others() -> None:
    before, started_s = CpuTime.now(), time.monotonic()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        while CpuTime.now().own - before.own < 0.3:
            time.sleep(0.01)
        after, took_s = CpuTime.now(), time.monotonic() - started_s
        child.kill()
    assert after.machine - before.machine > 0.2
    assert after._replace(own=before.own).others_share(before, took_s) > after.others_share(
        before, took_s
    )


def test_verdict_recommends_no_arm_with_other_answers_one_at_a_time() -> None:
    wrong = {"single": figures(at_once=1, ttft=10.0, equal=5), "pool": figures(equal=7)}
    plain = {"single": figures(at_once=1), "pool": figures()}
    [alone, first, *_, at_once] = said(plain=plain, cache=plain, epd=wrong)
    assert alone.startswith("`epd` cannot be recommended: 3 of 8 answers differ one at a time")
    assert first.startswith("Run plain vLLM")
    assert at_once.startswith("`epd`: 1 of 8 answers differ at once: the batches differ")


def test_verdict_compares_arms_of_a_cut_off_run_over_the_workloads_of_all() -> None:
    plain = {name: figures() for name in "abc"}
    cache = {"a": figures(20.0, 50.0), "b": figures(5.0, 200.0)}
    assert said(plain=plain, cache=cache, epd={"a": figures(15.0, 66.0)}, example={}) == [
        "`cache` is incomplete: it has 2 of 3 workloads.",
        "`epd` is incomplete: it has 1 of 3 workloads.",
        "`example` is incomplete: it has 0 of 3 workloads.",
        f"Run `cache`: 2.00x of plain vLLM ({MEAN}).",
        "a: `cache`, 2.00x requests/s, 0.50x TTFT.",
        "b: `plain`.",
        "`cache` loses in: b, 0.50x requests/s, 2.00x TTFT.",
    ]


def test_verdict_advises_no_plain_vllm_that_fails_requests() -> None:
    plain = {"a": figures(), "b": figures(failed=8, requests_per_s=0.0, ttft_ms={})}
    [failed, advice, *rest] = said(plain=plain, cache={"a": figures(8.0), "b": figures()})
    assert failed == "`plain` cannot be recommended: 8 of its requests failed."
    assert advice.startswith("No advice: plain vLLM failed requests, and `cache` is 0.89x of it")
    assert not any(sentence.startswith("b:") for sentence in rest)


def test_verdict_has_no_gain_where_plain_vllm_failed_a_kind_of_request() -> None:
    plain = {"a": figures(at_once=1, failed=3, ttft_ms={"text": 50.0})}
    arm = {"a": figures(at_once=1, ttft_ms={"text": 50.0, "picture": 100.0})}
    assert said(plain=plain, cache=arm)[-1].startswith("No verdict: no other arm can be compared")


def test_verdict_advises_the_simpler_of_arms_that_gain_about_as_much() -> None:
    [first, second] = said(
        plain={"a": figures()}, cache={"a": figures(15.0, 66.0)}, epd={"a": figures(15.2, 66.0)}
    )
    assert first.startswith("Run `cache`: 1.51x")
    assert second.startswith("a: `cache`")


def test_verdict_lists_a_loss_of_one_figure() -> None:
    said_of = said(plain={"a": figures()}, cache={"a": figures(20.0, 190.0)})
    assert said_of[-1] == "`cache` loses in: a, 1.90x TTFT."


def test_event_that_is_no_part_of_an_answer_is_its_error() -> None:
    event = {"object": "error", "message": "engine dead"}
    assert "engine dead" in read_answer([event], "", 0.0).error


def test_verdict_needs_plain_vllm() -> None:
    assert said(epd={"pool": figures()})[0].startswith("No verdict: plain vLLM was not measured")
    assert said(plain={"pool": figures()}) == [
        "No verdict: no other arm can be compared with plain vLLM."
    ]


def test_figures_count_differences_failures_and_the_sources_of_items() -> None:
    questions = [Question(kind, [], 2) for kind in ("new", "new", "again", "again")]
    workload = Workload("w", 1, [questions])
    usage = {"prompt_tokens": 6}
    expected = [Answer(200, "ab", [-1.0, -2.0], usage=usage, seconds=0.1)] * 4
    got = [
        Answer(200, "ab", [-1.0, -2.04], usage=usage, items="hit=1,encoded=0,local=0", seconds=0.2),
        Answer(200, "ab", [-1.0, -2.5], usage=usage, items="hit=0,encoded=2,local=1", seconds=0.4),
        Answer(200, "ac", [-1.0, -2.0], usage=usage, seconds=0.6),
        Answer(503, error="no instance"),
    ]
    result = figures_of(workload, got, 2.0, 0.0, expected, 0.05)
    assert (result.asked, result.failed, result.requests_per_s) == (4, 1, 1.5)
    assert (result.compared, result.equal, result.distinct) == (3, 1, 2)
    assert result.farthest == pytest.approx(0.5)
    assert result.ttft_ms == {"new": pytest.approx(300), "again": pytest.approx(600)}
    assert result.items == {"hit": 1, "encoded": 2, "local": 1}
    assert list(result.notes) == ["503: no instance", "log-probabilities, by 0.5", "tokens"]


def pictures(question: Question) -> list[str]:
    content = question.messages[-1]["content"]
    return [part["image_url"]["url"] for part in content if part["type"] == "image_url"]


def test_a_turn_of_window_shows_four_pictures_of_the_turn_before() -> None:
    [workload] = window(SMALL)
    assert len(workload.conversations) == SMALL.users
    for turns in workload.conversations:
        for before, after in pairwise(turns):
            assert len({*pictures(before)} & {*pictures(after)}) == 4


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_is_the_same_each_time_and_its_prompts_share_no_beginning(name: str) -> None:
    workloads = [*WORKLOADS[name](SMALL)]
    assert workloads == [*WORKLOADS[name](SMALL)]
    first_turns = [turns for workload in workloads for turns in workload.conversations]
    asked = first_turns[0] if name == "single" else [turns[0] for turns in first_turns]
    texts = [question.messages[0]["content"][0]["text"] for question in asked]
    assert len({*texts}) == len(texts)


def started(out: Path, *flags: str, behaviour: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a comparison of fake fleets."""
    words = ["-m", "tests.tools.bench.compare.compared", "tests.tools.bench.fake_up"]
    words += ["bench", "compare", "--model", "m", "--scale", "small", "--out", str(out), *flags]
    environment = {**os.environ, "FAKE_UP": json.dumps(behaviour)}
    output = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, *words], env=environment, stdout=output, stderr=output)


def results_in(out: Path) -> Any:
    return json.loads((out / "results.json").read_bytes())


def compare(out: Path, *flags: str, behaviour: Mapping[str, str]) -> Any:
    """Return the results of a comparison of fake fleets."""
    started(out, *flags, behaviour=behaviour).wait()
    return results_in(out)


def test_an_arm_that_is_made_slower_is_not_the_one_to_run(tmp_path: Path) -> None:
    flags = ["--workloads", "pool", "--arms", "plain", "cache", "epd"]
    slow = compare(tmp_path, *flags, behaviour={"1pd": "slow", "1epd": "slow"})
    assert any(sentence.startswith("Run `epd`") for sentence in slow["verdict"])
    assert slow["end"] == ""
    assert "- Run `epd`" in (tmp_path / "report.md").read_text()

    slow = compare(tmp_path, *flags, behaviour={"1epd": "slow", "1e1pd": "slow"})
    assert any(sentence.startswith("Plain vLLM is better") for sentence in slow["verdict"])


def test_answers_are_compared_with_those_of_plain_vllm(tmp_path: Path) -> None:
    flags = ["--workloads", "pool", "--arms", "plain", "cache", "epd"]
    measured = compare(tmp_path, *flags, behaviour={"1e1pd": "strange"})["arms"]
    counts = {
        name: [(each["equal"], each["compared"]) for each in arm["workloads"].values()]
        for name, arm in measured.items()
    }
    assert counts == {
        "plain": [(0, 0), (0, 0)],
        "cache": [(12, 12), (12, 12)],
        "epd": [(0, 12), (0, 12)],
    }


def test_requests_of_a_trace_are_a_workload(tmp_path: Path) -> None:
    trace = tmp_path / "mine.jsonl"
    lines = [{"text_input": f"{n}?", "output_length": 4, "session_id": "s"} for n in range(3)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--traces", str(trace), "--arms", "plain", "epd"]
    arms = compare(tmp_path, *flags, behaviour={})["arms"]
    for arm in arms.values():
        assert {name: each["asked"] for name, each in arm["workloads"].items()} == {"mine": 3}
    assert arms["epd"]["workloads"]["mine"]["equal"] == 3


def test_flags_reach_each_epd_up_unchanged(tmp_path: Path) -> None:
    vllm = "--vllm-flags=--max-model-len 64 --compilation-config '{\"mode\": 0}'"
    up = ["--gpu-memory-utilization-pd", "0.6", vllm]
    compare(tmp_path, "--workloads", "text", "--gpus", "e=1,pd=0", "--", *up, behaviour={})
    gpus = {"plain": "pd=0", "cache": "pd=0", "epd": "e=1,pd=0"}
    for arm, devices in gpus.items():
        first = (tmp_path / "logs" / f"{arm}.log").read_text().splitlines()[0]
        assert json.loads(first.removeprefix("argv "))[-5:] == ["--gpus", devices, *up]


def test_arm_gets_the_devices_of_its_stages_as_epd_up_reads_them() -> None:
    assert gpus_of("epd", "e=1, PD=0") == ["--gpus", "e=1, PD=0"]
    assert gpus_of("plain", "e=1,PD =0") == ["--gpus", "PD =0"]


def test_example_proxy_is_measured_with_its_own_connector(tmp_path: Path) -> None:
    fake = Path(__file__).parent.with_name("fake_up.py")
    flags = ["--arms", "plain", "example", "--example", str(fake), "--workloads", "text"]
    up = ["--", "--encode-flags=--seed 3", "--gpu-memory-utilization-pd", "0.6"]
    results = compare(tmp_path, *flags, *up, behaviour={})
    assert results["arms"]["example"]["workloads"]["text"]["equal"] == 8

    started, proxy = (
        json.loads(log.read_text().splitlines()[0].removeprefix("argv "))
        for log in (tmp_path / "logs" / "example.log", tmp_path / "logs" / "example-proxy.log")
    )
    [encode, decode] = (shlex.split(word.partition("=")[2]) for word in started[-2:])
    assert encode[:3] == ["--seed", "3", "--ec-transfer-config"]
    configs = [json.loads(words[-1]) for words in (encode, decode)]
    assert [config["ec_role"] for config in configs] == ["ec_producer", "ec_consumer"]
    assert proxy[2:6] == ["--encode-servers-urls", f"{proxy[-1]}/e", *PREFILL]


def test_arms_that_fail_are_reported_and_the_others_measured(tmp_path: Path) -> None:
    flags = ["--workloads", "text", "--arms", "plain", "cache", "epd", "e+p+d"]
    behaviour = {"1epd": "broken", "1e1pd": "failing"}
    results = compare(tmp_path, *flags, behaviour=behaviour)
    assert "it does not start" in results["arms"]["cache"]["error"]
    assert results["arms"]["epd"]["workloads"]["text"]["failed"] == 8
    assert list(results["arms"]["e+p+d"]["workloads"]) == ["text"]
    assert "`cache`: it does not start" in (tmp_path / "report.md").read_text()


def test_a_run_that_is_cut_off_keeps_what_it_measured(tmp_path: Path) -> None:
    flags = ["--workloads", "text", "single", "--arms", "plain", "epd"]
    log = tmp_path / "logs" / "epd.log"
    with started(tmp_path, *flags, behaviour={"1e1pd": "endless"}) as process:
        while not log.exists() or b"ready: " not in log.read_bytes():
            time.sleep(0.05)
        process.terminate()
    results = results_in(tmp_path)
    assert results["end"]
    assert list(results["arms"]["plain"]["workloads"]) == ["text", "one at a time"]
    report = (tmp_path / "report.md").read_text()
    assert "**Cut off:" in report
    assert "| 4 x 224x112, again |" in report


def test_a_time_limit_ends_a_run(tmp_path: Path) -> None:
    flags = ["--arms", "plain", "--workloads", "text", "--time-limit", "0.5"]
    assert compare(tmp_path, *flags, behaviour={"1pd": "endless"})["end"]


def test_a_time_limit_that_ends_while_an_arm_stops_lets_it_stop(tmp_path: Path) -> None:
    flags = ["--arms", "plain", "--workloads", "text", "--time-limit", "600"]
    log = tmp_path / "logs" / "plain.log"
    with started(tmp_path, *flags, behaviour={"1pd": "lingering"}) as process:
        while not log.exists() or b"ending" not in log.read_bytes():
            time.sleep(0.05)
        process.send_signal(signal.SIGALRM)
    assert "ended" in log.read_text().splitlines()
    assert results_in(tmp_path)["end"]


def test_arms_that_die_start_cold_or_cut_answers_short_have_failed(tmp_path: Path) -> None:
    flags = ["--arms", "epd", "cache", "plain", "--workloads", "text", "pool", "text"]
    behaviour = {"1e1pd": "dying", "1epd": "cold", "1pd": "short"}
    with started(tmp_path, *flags, behaviour=behaviour) as process:
        pass
    assert process.returncode == 1
    arms = results_in(tmp_path)["arms"]
    assert list(arms) == ["plain", "cache", "epd"]
    assert arms["plain"]["workloads"]["text"]["failed"] == 8
    assert arms["plain"]["workloads"]["text"]["notes"] == ["200: 1 of 8 tokens"]
    assert not arms["cache"]["workloads"]
    assert "the first requests failed" in arms["cache"]["error"]
    assert list(arms["epd"]["workloads"]) == ["text"]
    assert arms["epd"]["error"].startswith("epd ended with code 3. The end of ")


def test_failed_requests_fail_the_command(tmp_path: Path) -> None:
    flags = ["--arms", "plain", "--workloads", "text"]
    with started(tmp_path, *flags, behaviour={"1pd": "failing"}) as process:
        pass
    assert process.returncode == 1
    assert results_in(tmp_path)["end"] == ""


def test_figures_outlive_a_verdict_that_cannot_be_made(tmp_path: Path) -> None:
    results = Results(
        command=[],
        started_at=datetime.now(UTC),
        model="m",
        scale="small",
        tolerance=0.05,
        facts={},
        arms={"plain": ArmResult([], workloads={"text": figures()})},
    )
    with pytest.raises(KeyError):
        write_results(results, tmp_path, Mock(side_effect=KeyError))
    assert results_in(tmp_path)["arms"]["plain"]["workloads"]["text"]["asked"] == 8
    assert results_in(tmp_path)["end"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--time-limit", "-1"], "--time-limit -1.0 is not 0 or more seconds"),
        (["--time-limit", "nan"], "--time-limit nan is not 0 or more seconds"),
        (["--gpus", "e=0,pd=0", "--arms", "plain", "e+p+d"], "no device for p, d of arm e"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["bench", "compare", "--model", "m", *flags])


def test_a_model_is_required() -> None:
    with pytest.raises(SystemExit, match="--model or --generate is required"):
        main(["bench", "compare"])
    with pytest.raises(SystemExit, match="--arms example needs --example FILE"):
        main(["bench", "compare", "--model", "m", "--arms", "example"])
    with pytest.raises(SystemExit, match="--gpus 'x=1' is not of the form"):
        main(["bench", "compare", "--model", "m", "--gpus", "x=1"])
