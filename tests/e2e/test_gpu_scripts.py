"""`scripts/gpu`, in a short form on the CPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

from epd.tools.bench.answer import Answer
from scripts.gpu import measure, model
from tests.e2e.stacks import VISION


def test_fleets_are_compared_with_one_engine(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(models / VISION), "--fleets", "mono", "e1pd", "--short"]
    up = ["--device", "cpu", "--log-path", str(tmp_path)]
    monkeypatch.setattr(measure, "EPD", [sys.executable, "-m", "tests.e2e.forked_up"])
    monkeypatch.setattr(sys, "argv", ["measure", *flags, "--", *up])
    monkeypatch.setenv("EPD_EC_STORE_BUDGET_S", "5")  # a late look-up would be no hit

    measure.main()

    results = json.loads(capfd.readouterr().out)
    for name in ("mono", "e1pd"):
        answers = results[name]["answers"]
        assert (answers["asked"], answers["distinct"]) == (31, 31)
        assert (answers["equal"], answers["differences"]) == (31, [])
        assert len(results[name]["ttft_ms"]) == 7
        assert [(load["asked"], load["answered"]) for load in results[name]["load"].values()] == [
            *((8, 8), (8, 8), (4, 4)),
        ]
    items = results["e1pd"]["answers"]["items"]
    assert items["hit=1,encoded=0,local=0"] == 10
    assert items["hit=4,encoded=0,local=0"] == 3


def test_an_answer_that_differs_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([["a", "b"], ["a", "c"]])

    def measured(*_: object) -> object:
        tokens = next(answers)
        return {}, {"text": [Answer(200, tokens, [0.0] * len(tokens))]}

    monkeypatch.setattr(measure, "measure", measured)
    flags = ["--model", str(tmp_path), "--fleets", "mono", "e1pd"]
    monkeypatch.setattr(sys, "argv", ["measure", *flags])
    measure.main()

    compared = json.loads(capsys.readouterr().out)["e1pd"]["answers"]
    assert (compared["equal"], compared["differences"]) == (0, ["tokens"])


def test_the_model_has_the_size_of_the_published_one() -> None:
    with torch.device("meta"):
        built = model.build().model

    assert sum(weight.numel() for weight in built.parameters()) == 8_292_166_656
