"""Virtual environments with the wheels of `scripts/wheels.sh`, and without this checkout."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

WHEELS = os.environ.get("WHEELS", "")
"""Folder with both wheels."""

needs_wheels = pytest.mark.skipif(not WHEELS, reason="scripts/wheels.sh builds the wheels")


def wheel(distribution: str) -> Path:
    """Return the wheel of a distribution, by its name with underscores."""
    [found] = Path(WHEELS).glob(f"{distribution}-*.whl")
    return found


class Environment:
    """Virtual environment in a folder, of the Python that runs this."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)

    def install(self, *requirements: str | Path, dependencies: bool = True) -> None:
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python)
        flags = ("--quiet", "--no-compile", *(() if dependencies else ("--no-deps",)))
        subprocess.run([*pip, "install", *flags, *requirements], check=True)

    def add_packages_of_this_python(self) -> None:
        """Make the packages of this Python importable, without its editable installs."""
        here = Path(sysconfig.get_path("purelib"))
        [site] = self.folder.glob("lib/python*/site-packages")
        (site / "beside.pth").write_text(f"{here}\n")
        # Python reads such files in its own folder only. Their other lines lead to checkouts.
        for file in here.glob("*.pth"):
            lines = file.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.startswith("import ")]
            (site / file.name).write_text("".join(kept))

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in its folder."""
        return subprocess.run(
            [self.folder / "bin" / words[0], *words[1:]],
            cwd=self.folder,
            env=environ(),
            capture_output=True,
            text=True,
            check=check,
        )


def environ() -> dict[str, str]:
    """Return this process's environment without the paths that lead to the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
