from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from xml.etree import ElementTree as ET

import orjson
import pytest

from epd.__main__ import main
from tests.support.programs import called, run

RUN = {
    "name": "epd",
    "dataset": "pool",
    "ttft_ms": {"mean": 50.0, "p50": 40.0, "p99": 90.0},
    "hit_rate": 0.75,
    "ideal_hit_rate": 0.8,
}
PLAIN = {**RUN, "name": "vllm", "hit_rate": None, "ideal_hit_rate": None}


def contender(cpu_ms: float) -> dict[str, float]:
    return {"cpu_ms": cpu_ms, "resident_bytes": 1e8 * cpu_ms}


OVERHEAD = {
    "kind": "overhead",
    "results": [
        {
            "scenario": {"title": title, "fresh": fresh},
            "contenders": {
                "direct": contender(0.0),
                "epd": contender(1.25),
                "relay": contender(2.5),
            },
        }
        for title, fresh in (("text", False), ("memory", True))
    ],
}
SERVE = {"kind": "serve", "runs": [RUN, PLAIN]}


def written(document: object, folder: Path) -> Path:
    results = folder / "results.json"
    results.write_bytes(orjson.dumps(document))
    return results


def plot(
    document: object, folder: Path, *, by: Callable[..., CompletedProcess[str]] = called
) -> CompletedProcess[str]:
    return by("bench", "plot", str(written(document, folder)), "--folder", str(folder))


def texts(picture: Path) -> set[str]:
    return {"".join(it.itertext()).strip() for it in ET.parse(picture).iter() if it.text}  # noqa: S314


@pytest.mark.parametrize(
    ("document", "names", "words"),
    [
        (OVERHEAD, {"overhead", "overhead-memory"}, {"text", "epd", "relay", "1.25 ms"}),
        (SERVE, {"serve-ttft", "serve-hits"}, {"epd, pool", "vllm, pool", "90 ms"}),
    ],
)
def test_light_and_dark_plots_show_the_measurements(
    document: dict[str, object], names: set[str], words: set[str], tmp_path: Path
) -> None:
    assert plot(document, tmp_path).returncode == 0
    pictures = {it.name: it for it in tmp_path.glob("*.svg")}

    assert set(pictures) == {f"{name}-{theme}.svg" for name in names for theme in ("light", "dark")}
    for theme in ("light", "dark"):
        assert words <= set().union(*(texts(it) for it in pictures.values() if theme in it.name))
    for name in names:
        light, dark = (pictures[f"{name}-{theme}.svg"] for theme in ("light", "dark"))
        assert texts(light) == texts(dark)
        assert light.read_bytes() != dark.read_bytes()


def test_plot_is_deterministic(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, by in zip(folders, (called, run), strict=True):
        folder.mkdir()
        assert plot(OVERHEAD, folder, by=by).returncode == 0

    first, second = ((folder / "overhead-dark.svg").read_bytes() for folder in folders)
    assert first == second


def test_a_target_without_a_cache_is_left_out_of_the_hit_rates(tmp_path: Path) -> None:
    plot(SERVE, tmp_path)

    assert "vllm, pool" not in texts(tmp_path / "serve-hits-light.svg")


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"kind": "other"},
        {"kind": "serve"},
        {"kind": "overhead", "results": [{"scenario": {"fresh": False}, "contenders": []}]},
        [],
        "no",
    ],
)
def test_a_file_without_results_is_reported_in_one_line(
    document: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "plot", str(written(document, tmp_path)), "--folder", str(tmp_path)])

    assert ended.value.code == 2
    assert "has no results" in capsys.readouterr().err


def test_a_missing_folder_is_reported_in_one_line(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    results.write_bytes(orjson.dumps(OVERHEAD))
    done = called("bench", "plot", str(results), "--folder", "/none")

    assert done.returncode == 1
    assert "No such file" in done.stderr
    assert "Traceback" not in done.stderr
