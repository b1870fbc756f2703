"""Modules that run with PyTorch and without the project's other dependencies."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: scripts/test.sh installs it"
)

ROOT = Path(__file__).resolve().parents[3]
BLOCKED = """
import os, runpy, sys
os.environ.update(CUDA_VISIBLE_DEVICES="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
absent = ["aiohttp", "orjson", "pydantic", "redis", "vllm", "xxhash"]
sys.modules.update(dict.fromkeys(absent))
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return done.stdout


def test_copies_of_tensors_import_nothing_else() -> None:
    assert run("import ec_store.engine.region, ec_store.engine.tensors\nprint('ok')") == "ok\n"


@pytest.mark.full
def test_gpu_tests_and_benchmark_report_why_they_are_skipped() -> None:
    benchmark = run(
        "sys.argv = ['bench_gpu']\n"
        "try: runpy.run_path('scripts/bench_gpu.py', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
    )
    assert benchmark == "skipped: PyTorch finds no CUDA device\n"
    tests = run("import pytest\nsys.exit(pytest.main(['-p', 'no:cacheprovider', 'tests/gpu']))\n")
    assert "PyTorch finds no CUDA device" in tests
    assert "rootdir: " + str(ROOT / "tests" / "gpu") in tests
