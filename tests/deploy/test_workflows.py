"""The workflows run a developer's commands, with few rights, and publish after an approval."""

import re
from typing import Any

import pytest

from scripts.check_tag import problems
from tests.deploy.tools import load
from tests.paths import ROOT

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS: dict[str, dict[Any, Any]] = {
    path.stem: load(path) for path in sorted(FOLDER.glob("*.yml"))
}
JOBS = {
    (workflow, name): job
    for workflow, document in WORKFLOWS.items()
    for name, job in document["jobs"].items()
}
EVENTS = True
"""Key of `on`, which is a boolean in YAML 1.1."""
WRITES = {
    ("release", "images"): {"attestations", "id-token", "packages"},
    ("release", "publish"): {"attestations", "id-token"},
    ("release", "draft"): {"contents"},
}
"""All rights to write, by job."""


def steps() -> list[dict[str, Any]]:
    return [step for job in JOBS.values() for step in job.get("steps", ())]


def test_only_the_jobs_of_a_release_write() -> None:
    granted = {
        job: {scope for scope, right in rights["permissions"].items() if right == "write"}
        for job, rights in JOBS.items()
    }

    assert {job: scopes for job, scopes in granted.items() if scopes} == WRITES
    assert [document["permissions"] for document in WORKFLOWS.values()] == [{}] * len(WORKFLOWS)
    assert {right for job in JOBS.values() for right in job["permissions"].values()} == {
        "read",
        "write",
    }


def test_uploads_wait_for_tests_and_for_a_person() -> None:
    release = WORKFLOWS["release"]["jobs"]

    assert set(WORKFLOWS["release"][EVENTS]) == {"push"}
    assert set(WORKFLOWS["release"][EVENTS]["push"]) == {"tags"}
    for name in ("images", "publish"):
        assert release[name]["environment"] == "release"
        assert set(release[name]["needs"]) == {"tests", "wheels", "scan"}
    assert set(release["draft"]["needs"]) == {"images", "publish"}
    [*_, create] = release["draft"]["steps"]
    assert "--draft" in create["run"].split()


def test_no_job_uses_a_secret_or_keeps_the_token_of_a_checkout() -> None:
    text = "".join(path.read_text() for path in FOLDER.iterdir())
    checkouts = [step for step in steps() if step.get("uses", "").startswith("actions/checkout@")]

    assert "secrets." not in text
    assert checkouts
    assert [step["with"]["persist-credentials"] for step in checkouts] == [False] * len(checkouts)


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_named_by_version(path: Any) -> None:
    used = re.findall(r"uses: (.+)$", path.read_text(), re.MULTILINE)

    assert used
    for action in used:
        assert re.fullmatch(
            r"\./\.github/workflows/\w+\.yml|[\w/.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action
        )


def test_an_action_has_one_commit_in_all_workflows() -> None:
    text = "".join(path.read_text() for path in FOLDER.iterdir())
    used = set(re.findall(r"uses: ([\w/.-]+)@(.+)$", text, re.MULTILINE))

    assert len({name for name, _ in used}) == len(used)


def test_every_script_and_file_that_a_workflow_names_exists() -> None:
    commands = "\n".join(step["run"] for step in steps() if "run" in step)
    named = set(re.findall(r"\bscripts/[\w.]+\b", commands))
    named |= {f"scripts/{name}.py" for name in re.findall(r"-m scripts\.(\w+)", commands)}
    named |= {step["with"]["file"] for step in steps() if "file" in step.get("with", {})}

    assert len(named) > 4
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_every_job_ends_in_time_and_in_no_expression_of_a_shell() -> None:
    """An expression in a command would let a name of a branch run as one."""
    for job in JOBS.values():
        assert "uses" in job or job["timeout-minutes"] <= 150
    assert [step["run"] for step in steps() if "${{" in step.get("run", "")] == []


def test_images_are_built_of_the_targets_of_the_dockerfile_for_both_architectures() -> None:
    images = WORKFLOWS["release"]["jobs"]["images"]
    built = {entry["target"]: entry["name"] for entry in images["strategy"]["matrix"]["include"]}
    [build] = [step["with"] for step in images["steps"] if step.get("id") == "build"]
    services = load(ROOT / "deploy" / "compose.yaml")["services"]
    of_compose = {
        service["build"].get("target", "proxy"): service["image"]
        for service in services.values()
        if "build" in service
    }

    assert built == of_compose
    assert build["platforms"] == "linux/amd64,linux/arm64"
    assert (build["provenance"], build["sbom"]) == ("mode=max", True)
    assert set(WORKFLOWS["release"]["jobs"]["scan"]["strategy"]["matrix"]["target"]) == set(built)


def test_a_release_of_vllm_is_checked_by_one_command_on_a_schedule() -> None:
    workflow = WORKFLOWS["vllm"]
    commands = [step["run"] for step in workflow["jobs"]["newest"]["steps"] if "run" in step]

    assert "schedule" in workflow[EVENTS]
    assert commands == ["./scripts/setup.sh", "./scripts/check_vllm.sh newest"]


def test_a_tag_must_be_the_version_and_in_the_changelog() -> None:
    changelog = "# Changelog\n\n## Unreleased\n\n## 0.2.0 - 2026-12-01\n"

    assert problems("v0.2.0", "0.2.0", changelog) == []
    [wrong_tag] = problems("v0.3.0", "0.2.0", changelog)
    assert "tag v0.2.0" in wrong_tag
    [no_section] = problems("v0.2.1", "0.2.1", changelog)
    assert "'## 0.2.1'" in no_section
