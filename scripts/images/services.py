"""The services of compose.yaml, with engines on the CPU, in containers of podman."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from epd.tools.up.engine import Engine
from epd.tools.up.plan import plan_fleet
from epd.tools.up.settings import FleetSettings
from scripts.images.programs import RUN, USER, Builder, run
from tests.paths import ROOT

PROJECT = "epd-images"
MODEL = "tiny-qwen2.5-vl"
MODELS = ROOT / ".run" / "models"
COMPOSE = ROOT / ".run" / "podman-compose"
STORE = "shm:///run/ec-store/arena.sock"
ENVIRONMENT = {
    "ENCODE_URLS": "http://encode:8200",
    "DECODE_URLS": "http://decode:8400",
    "GRAFANA_PASSWORD": "not started",
    "STORE_BYTES": "256MiB",
    "STORE_LIMIT": "1g",
}


def names(*, engines: bool) -> list[str]:
    """Return the services that are started."""
    return ["store", "proxy", *(["encode", "decode"] if engines else [])]


def container(service: str) -> str:
    return f"{PROJECT}_{service}_1"


@contextmanager
def compose(builder: Builder, *, engines: bool) -> Iterator[None]:
    """Start the services; then stop and remove them with their volumes."""
    if not COMPOSE.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", f"--target={COMPOSE}"]
        run(*pip, "podman-compose")
    override = RUN / "override.yaml"
    override.write_text(overrides(builder, engines=engines))
    # Neither journald nor syslog runs in most containers and CI machines.
    settings = RUN / "containers.conf"
    settings.write_text(
        '[containers]\nlog_driver = "k8s-file"\n'
        f'[engine]\nevents_logger = "file"\nruntime = "{builder.runtime}"\n'
    )
    environ = {
        **os.environ,
        **ENVIRONMENT,
        "EPD_ADMIN_API_KEY": os.urandom(16).hex(),
        "PYTHONPATH": str(COMPOSE),
        "CONTAINERS_CONF": str(settings),
    }
    command = [sys.executable, "-m", "podman_compose", f"--project-name={PROJECT}"]
    command += [f"--file={ROOT / 'deploy' / 'compose.yaml'}", f"--file={override}"]
    try:
        run(*command, "up", "--no-build", "--detach", *names(engines=engines), env=environ)
        yield
    finally:
        run(*command, "down", "--volumes", "--timeout=30", env=environ, check=False)


def overrides(builder: Builder, *, engines: bool) -> str:
    """Return a Compose file with the engines, and with what this machine refuses left out."""
    added: dict[str, dict[str, Any]] = {name: {} for name in names(engines=engines)}
    if engines:
        run(sys.executable, str(ROOT / "scripts" / "tiny_models.py"), str(MODELS), MODEL)
        fleet = FleetSettings(model=str(MODELS / MODEL), topology="1e1pd", device="cpu")
        encode, decode = plan_fleet(fleet, {}, STORE, dry_run=True).engines
        added |= {"encode": service(encode), "decode": service(decode)}
    if builder.limits:
        for options in added.values():
            options["ulimits"] = dict(builder.limits)
    text = yaml.safe_dump({"services": added}, sort_keys=False)
    version = tuple(map(int, re.findall(r"\d+", run("podman", "--version"))[:2]))
    if version < (4, 7):
        print("refused: extra_hosts of the proxy: podman before 4.7 knows no host-gateway")
        text = text.replace("  proxy:", "  proxy:\n    extra_hosts: !reset []", 1)
    return text


def service(engine: Engine) -> dict[str, Any]:
    """Return an engine of `epd up` as a service that is confined like the store's."""
    model = engine.settings.model
    inside = {model: "/model", "127.0.0.1": "0.0.0.0"}  # noqa: S104 - in a network of its own
    command = engine.command()
    return {
        "image": "epd-engine",
        "entrypoint": ["vllm"],
        "command": [inside.get(word, word) for word in command[command.index("serve") :]],
        "environment": {**engine.environment(), "HOME": "/tmp"},  # noqa: S108 - a tmpfs
        "user": f"{USER}:{USER}",
        "volumes": [f"{model}:/model:ro", "store:/run/ec-store"],
        "tmpfs": ["/tmp"],  # noqa: S108
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }
