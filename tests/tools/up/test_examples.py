"""The example scripts, with small servers instead of vLLM and the benchmark."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.ports import free_ports
from tests.tools.up.processes import left, marked, new_mark

pytestmark = pytest.mark.full

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
EPD = f"""#!/bin/sh
[ "$1" != bench ] || {{ echo "called: epd $*"; exit "$BENCH_CODE"; }}
exec {sys.executable} -m epd "$@"
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Return the example's variables, and an `epd` with a benchmark that does nothing."""
    epd = tmp_path / "bin" / "epd"
    epd.parent.mkdir()
    epd.write_text(EPD)
    epd.chmod(0o755)
    names = ["ENCODE_PORT", "PREFILL_DECODE_PORT", "PREFILL_PORT", "DECODE_PORT", "PROXY_PORT"]
    names += ["EPD_UP_NIXL_PORT", "EPD_UP_EC_STORE_PORT"]
    ports = dict(zip(names, map(str, free_ports(len(names))), strict=True))
    return ports | {
        "PATH": f"{epd.parent}:{os.environ['PATH']}",
        "EPD_UP_VLLM_COMMAND": f"{sys.executable} {Path(__file__).with_name('fake_vllm.py')}",
        "MODEL": "a/model",
        "DEVICE_PLATFORM": "cpu",
        "EC_SHARED_STORAGE_PATH": str(tmp_path / "ec"),
        "LOG_PATH": str(tmp_path / "logs"),
        "NUM_PROMPTS": "7",
        "BENCH_CODE": "0",
    }


def run(topology: str, environ: dict[str, str], mark: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPTS / f"disagg_{topology}_example.sh"],
        env=marked(mark) | environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("topology", ["1e1pd", "1e1p1d"])
def test_an_example_measures_asks_and_leaves_nothing(
    topology: str, environ: dict[str, str], tmp_path: Path
) -> None:
    mark = new_mark()
    ran = run(topology, environ, mark)
    url = f"http://127.0.0.1:{environ['PROXY_PORT']}"

    assert ran.returncode == 0, ran.stderr
    assert "ENDPOINT_PORT" not in ran.stderr
    assert f"called: epd bench serve --url {url} --model a/model --num-prompts 7\n" in ran.stdout
    assert '"content": "a fake answer"' in ran.stdout
    # The second message appears if the script ends before `epd up` has polled.
    assert "All servers are stopped." in ran.stdout or "epd up: stopped" in ran.stderr
    assert left(mark, 0) == {}
    assert (tmp_path / "ec").is_dir()
    decode = environ["PREFILL_DECODE_PORT" if topology == "1e1pd" else "DECODE_PORT"]
    assert list(tmp_path.glob(f"logs/*/*decode-{decode}.log"))


def test_a_failing_benchmark_is_the_examples_failure_and_an_old_variable_is_warned_of(
    environ: dict[str, str],
) -> None:
    mark = new_mark()
    ran = run("1e1pd", environ | {"BENCH_CODE": "3", "ENDPOINT_PORT": "10001"}, mark)

    assert ran.returncode == 3
    assert "ENDPOINT_PORT is ignored" in ran.stderr
    assert left(mark, 0) == {}


def test_an_engine_that_does_not_start_is_the_examples_failure(environ: dict[str, str]) -> None:
    mark = new_mark()
    ran = run("1e1pd", environ | {"EPD_UP_ENCODE_FLAGS": "--fake fail"}, mark)

    assert ran.returncode == 1
    assert "this model is too strange" in ran.stderr
    assert "called: epd bench" not in ran.stdout
    assert left(mark, 0) == {}
