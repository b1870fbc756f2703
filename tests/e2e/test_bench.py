"""`epd bench serve` on real engines."""

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.served import Served


def test_bench_serve_compares_a_stack_with_a_plain_engine(stack: Served, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    [plain] = stack.consumers
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "tests.tools.bench.forked_vllm", "bench", "serve"),
            *("--url", f"epd={stack.stack.url}", "--url", f"plain={plain.url}"),
            *("--model", stack.model, "--dataset", "window", "--num-prompts", "10"),
            *("--max-concurrency", "2", "--output-len", "8", "--warmups", "1"),
            *("--out", str(out)),
        ],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    through, beside = json.loads(out.read_bytes())["runs"]
    for run in (through, beside):
        assert (run["completed"], run["failed"], run["cut"]) == (10, 0, 0)
        assert run["ttft_ms"]["p99"] >= run["ttft_ms"]["p50"] > 0
        assert run["tpot_ms"]["p50"] > 0
    assert through["distinct_pictures"] == 2
    assert through["hit_rate"] == through["ideal_hit_rate"] == 0.8
    assert through["encodes_per_distinct_picture"] == 1
    assert beside["encodes_per_distinct_picture"] is None
    assert "not an EPD proxy" in beside["notes"][0]
