"""The patch for a Deployment that exists: its server gets the flags of `epd up --topology 1epd`."""

import json

from epd.config import ProxyConfig
from epd.tools.up.plan import plan_fleet
from epd.tools.up.settings import FleetSettings
from tests.deploy.tools import DEPLOY

CONTAINER = "/spec/template/spec/containers/0/"
STORE = "redis://epd-redis:6379"


def test_patch_adds_the_flags_of_a_server_to_those_that_the_deployment_has() -> None:
    patch = json.loads((DEPLOY / "kubernetes-servers.json").read_text())
    added = [step["value"] for step in patch if step["op"] == "add"]
    [engine] = plan_fleet(
        FleetSettings(model="m", device="cpu", topology="1epd"), {}, STORE
    ).engines
    command = engine.command()
    name, _, value = added[0].partition("=")

    assert {step["path"] for step in patch} == {f"{CONTAINER}image", f"{CONTAINER}args/-"}
    assert json.loads(value) == json.loads(command[command.index(name) + 1])
    assert added[1:] == ["--enable-request-id-headers"]
    assert added[1] in command


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
