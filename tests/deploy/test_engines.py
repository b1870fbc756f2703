"""The manifests start engines as `epd up` does, according to vLLM's own parser."""

import re
from collections.abc import Mapping

import pytest

from epd.tools.up.plan import plan_fleet
from epd.tools.up.settings import FleetSettings
from tests.deploy.manifests import ENGINES, WORKLOADS, container, settings
from tests.vllm_parser import needs_vllm, parsed

MEMORY = 6
"""Index in `parsed` of the fraction of device memory, which pods do not share."""


@pytest.mark.full
@needs_vllm
@pytest.mark.e2e
def test_vllm_parses_the_flags_of_deploy_as_those_of_epd_up() -> None:
    environ = settings("epd-engines")
    model = environ["MODEL"]
    pods = [
        ["serve", *(_expanded(word, environ) for word in container(name)["args"])]
        for name in ENGINES
    ]
    flags = FleetSettings(model=model, device="cuda", topology="1e1p1d", gpus="e=0,p=1,d=2")
    engines = plan_fleet(flags, {}, "redis://redis:6379").engines
    found = parsed([*pods, *(list(engine.command()[3:]) for engine in engines)])
    for one in found:
        del one[MEMORY]

    assert [one[0] for one in found] == [[]] * 6
    assert found[:3] == found[3:]


def _expanded(word: str, environ: Mapping[str, str]) -> str:
    """Return a word with its variables replaced, as Kubernetes does it."""
    return re.sub(r"\$\((\w+)\)", lambda found: environ[found[1]], word)


def test_vllm_ends_requests_within_the_time_that_kubernetes_gives_it() -> None:
    for name in ENGINES:
        [drain_s] = [
            int(word.removeprefix("--shutdown-timeout="))
            for word in container(name)["args"]
            if word.startswith("--shutdown-timeout=")
        ]
        pod = WORKLOADS[name]["spec"]["template"]["spec"]

        assert pod["terminationGracePeriodSeconds"] > drain_s
