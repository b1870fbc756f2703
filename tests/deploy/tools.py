"""Programs and files for the tests of `deploy/`."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.paths import ROOT

DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "epd.json"

Document = dict[str, Any]


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`, from .venv (`scripts/setup.sh`) or PATH."""
    found = shutil.which(name, path=str(Path(sys.prefix) / "bin")) or shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"no {name}: scripts/setup.sh takes it from Debian's `prometheus`")
    return found


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [program("promtool"), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=PROMETHEUS
    )


def load(path: Path) -> Document:
    """Return the document of a YAML file."""
    [document] = load_all(path)
    return document


def load_all(path: Path) -> list[Document]:
    """Every document of a YAML file."""
    return list(yaml.safe_load_all(path.read_text()))


def rules() -> list[Document]:
    """Return every recording rule and every alert."""
    files = (PROMETHEUS / name for name in load(PROMETHEUS / "prometheus.yml")["rule_files"])
    return [rule for file in files for group in load(file)["groups"] for rule in group["rules"]]
