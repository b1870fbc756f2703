"""The patch for a Deployment that exists: its server gets the flags of `epd up --topology 1epd`."""

import json
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from epd.config import ProxyConfig
from epd.tools.up.plan import plan_fleet
from epd.tools.up.settings import FleetSettings
from tests.deploy.tools import DEPLOY, Document

STORE = "redis://epd-redis:6379"
OWN_ARGS = ["MODEL", "--port=8000"]


def deployment(**container: Any) -> Document:
    """Return a Deployment of vLLM servers, without a connector."""
    labels = {"app": "vllm"}
    server = {"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", **container}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [server]}}
    spec = {"replicas": 2, "selector": {"matchLabels": labels}, "template": template}
    metadata = {"name": "vllm"}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def patched(document: Document) -> Document:
    """Apply the patch to a document (RFC 6902), in place."""
    for step in json.loads((DEPLOY / "kubernetes-servers.json").read_text()):
        *path, last = step["path"].split("/")[1:]
        target: Any = document
        for name in path:
            target = target[int(name) if isinstance(target, list) else name]
        if step["op"] == "add" and last == "-":
            target.append(step["value"])
        else:
            assert step["op"] == "replace"
            target[last] = step["value"]
    return document


def test_patched_deployment_has_the_flags_of_a_server_beside_its_own() -> None:
    document = patched(deployment(args=list(OWN_ARGS)))
    [engine] = plan_fleet(
        FleetSettings(model="m", device="cpu", topology="1epd"), {}, STORE
    ).engines
    command = engine.command()

    kubernetes_validate.validate(document, "1.34", strict=True)
    [server] = document["spec"]["template"]["spec"]["containers"]
    *own, transfer, request_ids = server["args"]
    name, _, value = transfer.partition("=")
    assert own == OWN_ARGS
    assert json.loads(value) == json.loads(command[command.index(name) + 1])
    assert request_ids == "--enable-request-id-headers"
    assert request_ids in command
    assert "epd-engine" in server["image"]


def test_patch_fails_on_a_deployment_without_args() -> None:
    with pytest.raises(KeyError):
        patched(deployment(command=["sh", "-c", "vllm serve MODEL"]))


def test_proxy_of_the_guide_uses_servers_that_the_dns_names() -> None:
    config = ProxyConfig.model_validate(
        {
            "discover_prefill_decode": "vllm:8000",
            "policies": "encode_local",
            "encode_servers_urls": "none",
            "ec_store": STORE,
        }
    )

    assert not config.encodes
