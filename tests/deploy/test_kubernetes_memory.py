"""The overlay with the memory of a node matches the base, the store and the proxy."""

import copy
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from ec_store.__main__ import make_parser
from ec_store.arena.remote_url import is_of_hosts
from ec_store.arena.url import ArenaOptions, arena_options
from epd.version import __version__
from tests.deploy import manifests
from tests.deploy.test_kubernetes import NEWEST, OLDEST, named, size
from tests.deploy.tools import DEPLOY, Document, load, load_all

FOLDER = DEPLOY / "kubernetes-memory"
KUSTOMIZATION = load(FOLDER / "kustomization.yaml")
CLIENTS = ("encode", "prefill")


def built() -> Iterator[Document]:
    """Yield the resources as kustomize builds them, without generated ConfigMaps."""
    base, *files = KUSTOMIZATION["resources"]
    assert base == "../kubernetes"
    added = [one for name in files for one in load_all(FOLDER / name)]
    for resource in [*copy.deepcopy(manifests.RESOURCES), *added]:
        for patch in KUSTOMIZATION["patches"]:
            kind, name = patch["target"]["kind"], patch["target"]["name"]
            if resource["kind"] == kind and re.fullmatch(name, resource["metadata"]["name"]):
                text = patch.get("patch") or (FOLDER / patch["path"]).read_text()
                if not apply(resource, yaml.safe_load(text)):
                    break
        else:
            yield resource


def apply(resource: Document, patch: Any) -> bool:
    """Apply a JSON patch (RFC 6902); return False for one that deletes the resource."""
    if isinstance(patch, dict):
        assert patch["$patch"] == "delete"
        return False
    for step in patch:
        *path, last = (part.replace("~1", "/") for part in step["path"].split("/")[1:])
        target: Any = resource
        for part in path:
            target = target[int(part)] if isinstance(target, list) else target[part]
        if last == "-":
            target.append(copy.deepcopy(step["value"]))
        else:
            assert (last in target) is (step["op"] == "replace")
            target[last] = copy.deepcopy(step["value"])
    return True


RESOURCES = list(built())
PODS = {
    one["metadata"]["name"]: one["spec"]["template"]["spec"]
    for one in RESOURCES
    if one["kind"] in {"Deployment", "StatefulSet", "DaemonSet"}
}
[STORE] = PODS["store"]["containers"]


def served() -> ArenaOptions:
    """Return the options of the store's server."""
    args = make_parser().parse_args(STORE["args"])
    return arena_options(args.url)


def urls() -> dict[str, str]:
    """Return the URLs in the merged ConfigMaps."""
    literals = [text for one in KUSTOMIZATION["configMapGenerator"] for text in one["literals"]]
    assert {one["behavior"] for one in KUSTOMIZATION["configMapGenerator"]} == {"merge"}
    return dict(text.split("=", 1) for text in literals)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("resource", RESOURCES, ids=named)
def test_a_resource_of_the_overlay_fits_the_schema(resource: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(resource, version, strict=True)


def test_the_overlay_uses_every_file_and_images_of_this_version() -> None:
    used = {"kustomization.yaml", "service-monitor.yaml", *KUSTOMIZATION["resources"][1:]}
    used |= {patch["path"] for patch in KUSTOMIZATION["patches"] if "path" in patch}

    assert used == {path.name for path in FOLDER.iterdir()}
    assert {image["newTag"] for image in KUSTOMIZATION["images"]} == {__version__}
    for container in (*PODS["store"]["containers"], *PODS["store"]["initContainers"]):
        assert container["image"] in {image["name"] for image in KUSTOMIZATION["images"]}


def test_clients_of_the_memory_are_on_its_node_and_use_its_socket() -> None:
    path = served().path
    volumes = {
        name: pod["volumes"][-1]["hostPath"]["path"]
        for name, pod in PODS.items()
        if name in {*CLIENTS, "store"}
    }
    mounts = {
        name: {
            mount["name"]: mount["mountPath"]
            for mount in PODS[name]["containers"][0]["volumeMounts"]
        }
        for name in volumes
    }

    assert urls() == {"EPD_EC_STORE": "shm+tcp://", "EC_STORE": f"shm://{path}"}
    assert set(volumes) == {*CLIENTS, "store"}
    assert len(set(volumes.values())) == 1
    assert {path.startswith(f"{mount['ec-store']}/") for mount in mounts.values()} == {True}
    selectors = [str(pod.get("nodeSelector")) for pod in PODS.values()]
    assert sorted(selectors) == [*["None"] * 2, *["{'epd-memory': 'true'}"] * 3]
    assert "redis" not in PODS


def test_clients_of_the_memory_have_the_group_of_its_socket() -> None:
    group = PODS["store"]["securityContext"]["runAsGroup"]
    [folder] = PODS["store"]["initContainers"]

    assert served().mode & 0o060 == 0o060
    assert {PODS[name]["securityContext"]["supplementalGroups"][0] for name in CLIENTS} == {group}
    assert folder["command"] == [
        *("install", "-d", "-o", str(group), "-g", str(group), "-m", "0750"),
        STORE["volumeMounts"][0]["mountPath"],
    ]


def test_the_pod_of_the_memory_has_its_size_and_the_overhead() -> None:
    """The overhead is that of docs/guides/host-memory.md, for a million entries."""
    quota = served().max_bytes
    limits, requests = STORE["resources"]["limits"], STORE["resources"]["requests"]

    assert size(limits["memory"]) >= quota * 1.01 + 256 * 2**20 + 2**30
    assert limits["memory"] == requests["memory"]


def test_proxies_reach_the_server_that_it_names_with_its_key() -> None:
    args = make_parser().parse_args(STORE["args"])
    [proxy] = PODS["epd-proxy"]["containers"]
    keys = [
        {each["name"]: each["valueFrom"] for each in container["env"]}["EC_STORE_API_KEY"]
        for container in (STORE, proxy)
    ]
    policies = {named(one): one["spec"] for one in RESOURCES if one["kind"] == "NetworkPolicy"}
    to_store = policies["NetworkPolicy/proxy-to-store"]
    own = policies["NetworkPolicy/store"]
    [host, port] = args.listen.split(":")

    assert is_of_hosts(urls()["EPD_EC_STORE"])
    assert keys[0] == keys[1] == {"secretKeyRef": {"name": "epd", "key": "store-key"}}
    assert (host, args.advertise) == ("0.0.0.0", f"$(POD_IP):{port}")  # noqa: S104
    assert {"name": "proxies", "containerPort": int(port)} in STORE["ports"]
    assert STORE["env"][2]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert to_store["podSelector"] == policies["NetworkPolicy/proxy"]["podSelector"]
    assert to_store["egress"] == [
        {"to": [{"podSelector": own["podSelector"]}], "ports": [{"port": int(port)}]}
    ]
    assert own["ingress"][1] == {
        "from": [{"podSelector": to_store["podSelector"]}],
        "ports": [{"port": int(port)}],
    }


def test_only_prometheus_and_proxies_reach_the_memory_by_network_and_it_only_redis() -> None:
    policies = {named(one): one["spec"] for one in RESOURCES if one["kind"] == "NetworkPolicy"}
    [service] = [one for one in RESOURCES if named(one) == "Service/store"]
    [monitor] = load_all(FOLDER / "service-monitor.yaml")
    port, _ = STORE["ports"]
    labels = {"app.kubernetes.io/part-of": "epd", "app.kubernetes.io/name": "store"}
    own, redis = policies["NetworkPolicy/store"], policies["NetworkPolicy/store-to-redis"]

    assert own["podSelector"] == {"matchLabels": labels}
    [ingress, _], [egress] = own["ingress"], own["egress"]
    assert [list(source) for source in ingress["from"]] == [["namespaceSelector"]]
    assert ingress["ports"] == [{"port": port["containerPort"]}]
    assert egress["to"] == [{"podSelector": redis["podSelector"]}]
    assert redis["podSelector"] == policies["NetworkPolicy/redis"]["podSelector"]
    assert redis["ingress"] == [
        {"from": [{"podSelector": own["podSelector"]}], "ports": egress["ports"]}
    ]
    assert make_parser().parse_args(STORE["args"]).port == port["containerPort"]
    assert monitor["spec"]["selector"] == {"matchLabels": service["metadata"]["labels"]}
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert STORE["env"][0]["name"] == "EC_STORE_API_KEY"


def test_the_tier_for_several_nodes_is_the_redis_of_the_base() -> None:
    [flag] = re.findall(r"# - (--tier=\S+) #", (FOLDER / "store.yaml").read_text())
    args = make_parser().parse_args([*STORE["args"], flag])

    assert args.tier == [manifests.settings("epd-proxy")["EPD_EC_STORE"]]
    assert STORE["env"][1]["name"] == "EC_STORE_REDIS_PASSWORD"


def test_the_base_reads_the_store_of_its_engines_from_their_settings() -> None:
    url = manifests.settings("epd-engines")["EC_STORE"]

    assert url == manifests.settings("epd-proxy")["EPD_EC_STORE"]
    assert urlsplit(url).scheme == "redis"
    for name in ("encode", "prefill"):
        assert '{"store": "$(EC_STORE)"}' in " ".join(manifests.container(name)["args"])
