"""`epd bench compare` with real engines, and the models that `--generate` writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from epd.__main__ import main
from epd.tools.models import full_size
from scripts.ports import free_ports
from tests.e2e.stacks import VISION

PORTS = ("port", "ec-store-port", "encode-port", "prefill-decode-port")


def test_fleets_are_compared_with_plain_vllm(models: Path, tmp_path: Path) -> None:
    words = [
        *(sys.executable, "-m", "tests.tools.bench.compare.compared", "tests.e2e.forked_up"),
        *("bench", "compare", "--model", str(models / VISION), "--scale", "small"),
        *("--arms", "plain", "epd", "--out", str(tmp_path), "--tolerance", "0.001"),
        *("--", "--device", "cpu"),
        *(f"--{name}={port}" for name, port in zip(PORTS, free_ports(len(PORTS)), strict=True)),
        *("--proxy-flags", "--ec-store-budget-s 5"),  # a late look-up would be no hit
    ]
    subprocess.run(words, check=True)

    results = json.loads((tmp_path / "results.json").read_bytes())
    plain, epd = (results["arms"][name]["workloads"] for name in ("plain", "epd"))
    assert list(plain) == list(epd)
    for name, workload in epd.items():
        assert (workload["failed"], workload["equal"]) == (0, workload["asked"]), name
        assert workload["distinct"] == workload["asked"], name
    assert epd["one at a time"]["items"] == {"hit": 16, "encoded": 16, "local": 0}
    assert epd["pool, second pass"]["items"]["hit"] == 12
    assert epd["unique"]["items"]["encoded"] == 8


def test_up_writes_a_tiny_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    weights = tmp_path / "epd" / "models" / "tiny" / "model.safetensors"
    words = ["up", "--generate", "tiny", "--device", "cpu", "--dry-run"]
    main(words)
    written = weights.stat().st_mtime_ns
    main(words)

    assert weights.stat().st_mtime_ns == written
    assert f"serve {weights.parent} " in capfd.readouterr().out.replace("\\\n", "")
    assert [path.name for path in weights.parent.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize(
    ("build", "parameters"),
    [("qwen2_5_vl_7b", 8_292_166_656), ("qwen3_vl_8b", 8_767_123_696)],
)
def test_a_model_has_the_size_of_the_published_one(build: str, parameters: int) -> None:
    with torch.device("meta"):
        model = getattr(full_size, build)().model

    assert sum(weight.numel() for weight in model.parameters()) == parameters


@pytest.mark.parametrize("build", ["qwen2_5_vl_7b", "qwen3_vl_8b"])
def test_vllm_finds_every_weight_of_a_model_with_its_shape(build: str) -> None:
    words = [sys.executable, "-m", "tests.e2e.full_size", build]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines()[-1] == ""
