"""Kubernetes manifests, combined as kustomize combines them."""

from collections.abc import Mapping
from typing import Any

from tests.deploy.tools import DEPLOY, Document, load, load_all

FOLDER = DEPLOY / "kubernetes"
KUSTOMIZATION = load(FOLDER / "kustomization.yaml")
RESOURCES = [one for name in KUSTOMIZATION["resources"] for one in load_all(FOLDER / name)]
SECRET = load(FOLDER / "secret.example.yaml")
ENGINES = ("encode", "prefill", "decode")

Labels = Mapping[str, str]


def of_kind(*kinds: str) -> dict[str, Document]:
    """Return the resources of these kinds by name."""
    return {one["metadata"]["name"]: one for one in RESOURCES if one["kind"] in kinds}


WORKLOADS = of_kind("Deployment", "StatefulSet")
POLICIES = of_kind("NetworkPolicy")


def labels(workload: str) -> dict[str, str]:
    """Return the labels of the workload's pods."""
    found: dict[str, str] = WORKLOADS[workload]["spec"]["template"]["metadata"]["labels"]
    return found


def container(workload: str) -> Document:
    """Return the only container of the workload."""
    [found] = WORKLOADS[workload]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def ports(workload: str) -> dict[str, int]:
    """Return the ports of the workload's container by name."""
    return {port["name"]: port["containerPort"] for port in container(workload)["ports"]}


def settings(generated: str) -> dict[str, str]:
    """Return the data of a ConfigMap that is generated from an env file."""
    [files] = [
        one["envs"] for one in KUSTOMIZATION["configMapGenerator"] if one["name"] == generated
    ]
    lines = [line for file in files for line in (FOLDER / file).read_text().splitlines()]
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def selects(selector: Mapping[str, Any], found: Labels) -> bool:
    """Return whether a label selector matches these labels."""
    expressions = selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in expressions)
    return all(
        found.get(key) == value for key, value in selector.get("matchLabels", {}).items()
    ) and all(found.get(one["key"]) in one["values"] for one in expressions)


def connects(source: str, target: str, port: int) -> bool:
    """Return whether the network policies let pods of `source` reach a port of `target`."""
    return _passes("egress", "to", source, target, port) and _passes(
        "ingress", "from", target, source, port
    )


def _passes(direction: str, side: str, workload: str, other: str, port: int) -> bool:
    """Return whether the workload's policies allow it; without a policy everything is allowed."""
    mine = [
        policy["spec"]
        for policy in POLICIES.values()
        if direction.capitalize() in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], labels(workload))
    ]
    return not mine or any(
        any(_is(peer, other) for peer in rule[side])
        and port in [one["port"] for one in rule.get("ports", [{"port": port}])]
        for policy in mine
        for rule in policy.get(direction, ())
    )


def _is(peer: Mapping[str, Any], workload: str) -> bool:
    return (
        "namespaceSelector" not in peer
        and "podSelector" in peer
        and selects(peer["podSelector"], labels(workload))
    )
