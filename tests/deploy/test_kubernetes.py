"""The manifests are valid for Kubernetes, and match each other and the proxy."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from ec_store import Entry, EntryKey, open_store
from epd.config import ProxyConfig
from epd.config.flags import FIELDS
from epd.config.load import load
from epd.discovery.watched_names import LOOK_UP_S
from epd.routing.instances import Instance, Role
from epd.server.app import openapi_document
from epd.version import __version__
from tests.deploy.manifests import (
    ENGINES,
    FOLDER,
    KUSTOMIZATION,
    RESOURCES,
    SECRET,
    WORKLOADS,
    connects,
    container,
    labels,
    of_kind,
    ports,
    selects,
    settings,
)
from tests.deploy.tools import DEPLOY, load_all
from tests.support.redis_server import RedisServer

OLDEST, NEWEST = "1.29", "1.34"
"""Versions of Kubernetes with schemas that the manifests must match."""
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
READ_TO_THE_END_S = 5
"""Seconds for a client to read the final error when draining cuts it off."""
MEMORY_OF_A_BODY = 7
"""Memory of a request body, in multiples of its size; see docs/configuration/operation.md."""
REACHES = {
    ("epd-proxy", "encode", "http"),
    ("epd-proxy", "prefill", "http"),
    ("epd-proxy", "decode", "http"),
    ("epd-proxy", "redis", "redis"),
    ("encode", "redis", "redis"),
    ("prefill", "redis", "redis"),
    ("prefill", "decode", "nixl"),
    ("decode", "prefill", "nixl"),
    ("prefill", "decode", "http"),  # UCX may take any port
    ("decode", "prefill", "http"),
}
"""All connections that the network policies allow."""


def size(quantity: str) -> int:
    number, unit = quantity[:-2], quantity[-2:]
    return int(number) * UNITS[unit]


def named(resource: dict[str, Any]) -> str:
    return f"{resource['kind']}/{resource['metadata']['name']}"


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("resource", [*RESOURCES, SECRET], ids=named)
def test_a_resource_fits_the_schema(resource: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(resource, version, strict=True)


def test_no_file_is_forgotten() -> None:
    named_files = {
        *KUSTOMIZATION["resources"],
        *(
            file
            for generated in KUSTOMIZATION["configMapGenerator"]
            for file in (*generated.get("envs", ()), *generated.get("files", ()))
        ),
    }
    optional = {"kustomization.yaml", "secret.example.yaml", "service-monitor.yaml"}

    assert named_files | optional == {path.name for path in FOLDER.iterdir()}


def test_images_are_of_this_version() -> None:
    assert {image["newTag"] for image in KUSTOMIZATION["images"]} == {__version__}
    assert {image["name"] for image in KUSTOMIZATION["images"]} == {
        container(name)["image"] for name in WORKLOADS if name != "redis"
    }


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_a_service_and_a_budget_select_its_pods(name: str) -> None:
    assert selects(WORKLOADS[name]["spec"]["selector"], labels(name))
    [service] = [
        service
        for service in of_kind("Service").values()
        if selects({"matchLabels": service["spec"]["selector"]}, labels(name))
    ]
    assert service["metadata"]["name"] == name
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports(name))
    budgets = [
        budget["spec"]["maxUnavailable"]
        for budget in of_kind("PodDisruptionBudget").values()
        if selects(budget["spec"]["selector"], labels(name))
    ]
    assert budgets == ([] if name == "redis" else [1])


@pytest.mark.parametrize("name", ENGINES)
def test_the_pods_of_engines_have_addresses_of_their_own(name: str) -> None:
    service = of_kind("Service")[name]["spec"]

    assert service["clusterIP"] == "None"
    assert WORKLOADS[name]["spec"]["serviceName"] == name
    # The URL has the pod's port: a headless service does not translate ports.
    [port] = service["ports"]
    assert port["port"] == ports(name)["http"]


def environment(monkeypatch: pytest.MonkeyPatch, secret: str) -> ProxyConfig:
    """Return the settings that the proxy reads from its environment."""
    for name, value in settings("epd-proxy").items():
        monkeypatch.setenv(name, value)
    for one in container("epd-proxy")["env"]:
        assert one["valueFrom"]["secretKeyRef"]["name"] == SECRET["metadata"]["name"]
        monkeypatch.setenv(one["name"], secret)
    return load({}).config


def test_the_proxy_looks_up_the_service_of_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    config = environment(monkeypatch, "0123456789abcdef" * 2)

    assert set(config.discovered_instances) == {
        Instance(Role(name), f"http://{name}:{ports(name)['http']}") for name in ENGINES
    }


@pytest.mark.parametrize("name", ENGINES)
def test_a_terminating_engine_leaves_dns_before_it_refuses_requests(name: str) -> None:
    pod, engine = WORKLOADS[name]["spec"]["template"]["spec"], container(name)
    waits_s = int(engine["lifecycle"]["preStop"]["exec"]["command"][1])
    [ends_s] = [int(it.partition("=")[2]) for it in engine["args"] if "--shutdown-timeout" in it]

    assert waits_s > 2 * LOOK_UP_S
    assert pod["terminationGracePeriodSeconds"] > waits_s + ends_s


def test_the_proxy_takes_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = environment(monkeypatch, "0123456789abcdef" * 2)
    pod = WORKLOADS["epd-proxy"]["spec"]["template"]["spec"]
    [keys] = pod["volumes"]
    [mount] = container("epd-proxy")["volumeMounts"]

    assert set(settings("epd-proxy")) <= {f"EPD_{name.upper()}" for name in FIELDS}
    assert config.admin_api_key is not None
    assert config.openai_api_key is not None
    assert config.key_secret is not None
    assert config.port == ports("epd-proxy")["http"]
    assert config.api_keys_file == Path(mount["mountPath"]) / keys["secret"]["items"][0]["path"]
    assert pod["terminationGracePeriodSeconds"] > (
        config.drain_delay_s + config.drain_timeout_s + READ_TO_THE_END_S
    )
    limit = size(container("epd-proxy")["resources"]["limits"]["memory"])
    assert limit > MEMORY_OF_A_BODY * config.max_inflight_bytes
    assert not pod["enableServiceLinks"]


def test_the_proxy_refuses_the_values_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    [value] = set(SECRET["stringData"].values())

    with pytest.raises(ValueError, match=r"(?i)admin_api_key"):
        environment(monkeypatch, value)


def test_the_example_defines_every_used_secret() -> None:
    overlay = load_all(DEPLOY / "kubernetes-memory" / "store.yaml")
    text = yaml.safe_dump([*RESOURCES, *overlay])
    used = set(re.findall(r"secretKeyRef:\s+key: (\S+)\s+name: epd\b", text))

    assert used | {"api-keys"} == set(SECRET["stringData"])


def test_probes_use_routes_of_the_proxy() -> None:
    proxy = container("epd-proxy")
    paths = {
        probe: proxy[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")
    }
    described = json.loads(openapi_document())["paths"]

    assert paths["readinessProbe"] == "/ready"
    # These answer 503 when engines are down; restarting the proxy would not help.
    assert paths["livenessProbe"] not in {"/health", "/ready"}
    for path in paths.values():
        assert described[path]["get"]["security"] == []
    assert "503" not in described[paths["livenessProbe"]]["get"]["responses"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_probes_use_declared_ports(name: str) -> None:
    for probe in ("livenessProbe", "readinessProbe"):
        asked = container(name)[probe]
        action = asked.get("httpGet") or asked.get("tcpSocket")

        assert action is None or action["port"] in ports(name)


@pytest.mark.parametrize("name", ["epd-proxy", "redis"])
def test_pods_that_need_no_root_are_restricted(name: str) -> None:
    pod = WORKLOADS[name]["spec"]["template"]["spec"]

    assert pod["securityContext"]["runAsNonRoot"]
    assert container(name)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_pod_has_a_token_or_may_gain_privileges(name: str) -> None:
    pod = WORKLOADS[name]["spec"]["template"]["spec"]

    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(name)["securityContext"]["allowPrivilegeEscalation"] is False
    assert "memory" in container(name)["resources"]["limits"]


@pytest.mark.security("S23")
def test_network_policies_allow_only_the_needed_connections() -> None:
    reached = {
        (source, target, name)
        for source, target in product(WORKLOADS, WORKLOADS)
        if source != target
        for name, port in ports(target).items()
        if connects(source, target, port)
    }

    assert reached == REACHES


def test_the_operator_of_prometheus_finds_the_services() -> None:
    monitors = load_all(FOLDER / "service-monitor.yaml")
    selected = {
        monitor["metadata"]["name"]: {
            name
            for name, service in of_kind("Service").items()
            if selects(monitor["spec"]["selector"], service["metadata"]["labels"])
        }
        for monitor in monitors
    }

    assert selected == {"epd": {"epd-proxy"}, "vllm": set(ENGINES)}
    for monitor in monitors:
        [endpoint] = monitor["spec"]["endpoints"]
        for name in selected[monitor["metadata"]["name"]]:
            assert endpoint["port"] in {
                port["name"] for port in of_kind("Service")[name]["spec"]["ports"]
            }
        job = next(one for one in endpoint["relabelings"] if one["targetLabel"] == "job")
        assert job["replacement"] == monitor["metadata"]["name"]
    assert monitors[0]["spec"]["endpoints"][0]["authorization"]["credentials"]["key"] == "admin-key"


def test_redis_takes_its_configuration_and_keeps_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real Redis accepts the configuration."""
    password = "0123456789abcdef"
    monkeypatch.setenv("EC_STORE_REDIS_PASSWORD", password)
    key = EntryKey("m@main:0", "cat")
    config = {"include": FOLDER / "redis.conf", "requirepass": password}
    with RedisServer(tmp_path, config) as server, open_store(server.url()) as store:
        store.put(key, Entry(memoryview(bytes(16)), "F32", (1, 4), "image", {}))

        assert store.get(key) is not None


def test_redis_leaves_a_fifth_of_its_container_beside_its_entries() -> None:
    [limit] = re.findall(r"^maxmemory (\d+)gb$", (FOLDER / "redis.conf").read_text(), re.MULTILINE)

    assert size(container("redis")["resources"]["limits"]["memory"]) >= int(limit) * 2**30 * 1.25


def test_redis_conf_is_the_one_of_the_documentation() -> None:
    documented = (
        (FOLDER.parents[1] / "docs/redis.md").read_text().split("## redis.conf")[1].split("```")[1]
    )
    shipped = _settings((FOLDER / "redis.conf").read_text())
    names = {"tls-port", "tls-cert-file", "tls-key-file", "tls-ca-cert-file", "port", "maxmemory"}

    assert ["maxmemory-samples", "10"] in shipped
    assert [line for line in shipped if line[0] not in names] == [
        line for line in _settings(documented) if line[0] not in names
    ]


def _settings(text: str) -> list[list[str]]:
    return [line.split() for each in text.splitlines() if (line := each.partition("#")[0].strip())]
