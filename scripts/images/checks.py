"""What images contain, how their containers are confined, what they answer, and how they stop."""

import base64
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from scripts.images.programs import USER, Builder, run
from scripts.images.services import MODEL, container, names
from tests.paths import ROOT

PROXY_URL = "http://127.0.0.1:8000"
PICTURE = ROOT / "examples" / "media" / "cat.jpg"
START_S = 900
"""Seconds until the proxy is ready; engines on two busy cores need some minutes."""
FOUND = """
from importlib.util import find_spec
print(*(name for name in ("ec_store", "epd", "vllm") if find_spec(name)))
"""
PACKAGES = {"ec-store": "ec_store", "epd-proxy": "ec_store epd", "epd-engine": "ec_store vllm"}
CONFINED = {
    "user": str(USER),
    "capabilities": 0,
    "no new privileges": "1",
    "seccomp": "2",
    "root": "ro",
}


def check_packages(builder: Builder, images: Sequence[str]) -> None:
    """Check which packages of this project each image has."""
    for name in images:
        words = ["--entrypoint=python3", f"localhost/{name}", "-c", FOUND]
        found = run(*builder.podman("run", *builder.run_flags(), *words)).splitlines()[-1]
        if found != PACKAGES[name]:
            sys.exit(f"{name} has {found}")
        print(f"{name}: has {found}")


def check_services(builder: Builder, *, engines: bool) -> None:
    """Check the services from their start to their end."""
    running = names(engines=engines)
    for name in map(container, running):
        check_confinement(name)
    wait_for_proxy("/ready" if engines else "/openapi.json", running)
    run(*builder.podman("healthcheck", "run", container("store")))
    if engines:
        run(*builder.podman("healthcheck", "run", container("proxy")))
        with openai.OpenAI(base_url=f"{PROXY_URL}/v1", api_key="none", max_retries=0) as client:
            ask_twice(client)
            drain(client, builder)
        running.remove("proxy")
    for name in running:
        stop(builder, name)


def check_confinement(name: str) -> None:
    """Check the limits of a container's process, as the kernel has them."""
    process = Path("/proc") / run("podman", "inspect", "--format={{.State.Pid}}", name)
    try:
        status = (process / "status").read_text().splitlines()
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    except OSError:
        sys.exit(f"{name} has ended:\n{logs(name)}")
    values = dict(line.split(":\t", 1) for line in status if ":\t" in line)
    [root] = (options for _, _, _, _, path, options, *_ in mounts if path == "/")
    found = {
        "user": values["Uid"].split()[0],
        "capabilities": int(values["CapBnd"], 16) | int(values["CapEff"], 16),
        "no new privileges": values["NoNewPrivs"],
        "seccomp": values["Seccomp"],
        "root": root.split(",")[0],
    }
    if found != CONFINED:
        sys.exit(f"{name}: {found}")
    print(f"{name}: user {USER}, no capabilities, no new privileges, seccomp, read-only root")


def wait_for_proxy(path: str, running: Sequence[str]) -> None:
    """Wait until the proxy answers 200; exit if a service ends, or after `START_S`."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        try:
            if httpx.get(f"{PROXY_URL}{path}").is_success:
                print(f"{path}: 200")
                return
        except httpx.TransportError:
            pass
        for name in map(container, running):
            if run("podman", "inspect", "--format={{.State.Status}}", name) != "running":
                sys.exit(f"{name} has ended:\n{logs(name)}")
        time.sleep(1)
    sys.exit(f"{path} did not answer 200 in time:\n{logs(container('proxy'))}")


def logs(name: str) -> str:
    """Return the end of what a container has printed."""
    command = ["podman", "logs", "--tail=30", name]
    done = subprocess.run(
        command, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.stdout


def question(tokens: int) -> dict[str, Any]:
    """Return a request with the picture."""
    url = f"data:image/jpeg;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is in this picture?"},
    ]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": tokens,
        "temperature": 0,
    }


def ask_twice(client: openai.OpenAI) -> None:
    """Check that a picture's second request has the answer of the first, without an encode."""
    answers, stages = [], []
    for _ in range(2):
        raw = client.chat.completions.with_raw_response.create(**question(16))
        answers.append(raw.parse().choices[0].message.content)
        stages.append(raw.headers["server-timing"])
    print(f"first request:  {stages[0]}\nsecond request: {stages[1]}")
    if "encode" not in stages[0] or "encode" in stages[1] or answers[0] != answers[1]:
        sys.exit(f"the second request was no hit, or had another answer: {answers}")


def drain(client: openai.OpenAI, builder: Builder) -> None:
    """Check that the proxy finishes a stream after SIGTERM, and then ends with 0."""
    draining = threading.Event()

    def terminate() -> None:
        stopping = threading.Thread(target=stop, args=(builder, "proxy"))
        stopping.start()
        while stopping.is_alive() and '"draining"' not in logs(container("proxy")):
            time.sleep(0.05)
        draining.set()
        stopping.join()

    ending = threading.Thread(target=terminate)
    late, reason = 0, None
    with client.chat.completions.create(
        **question(3000), stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        for chunk in stream:
            if not ending.ident:
                ending.start()
            late += draining.is_set()
            reason = chunk.choices[0].finish_reason if chunk.choices else reason
    ending.join()
    if reason != "length" or late < 2:  # noqa: PLR2004
        sys.exit(f"the stream broke off, or ended before the drain: {late} chunks, {reason}")
    print(f"the proxy drained: {late} more chunks of a stream, to its end")


def stop(builder: Builder, service: str) -> None:
    """Stop a service with SIGTERM; exit unless it ends with 0."""
    name = container(service)
    run(*builder.podman("stop", "--time=120", name))
    code = run("podman", "inspect", "--format={{.State.ExitCode}}", name)
    if code != "0":
        sys.exit(f"{name} ended with {code}:\n{logs(name)}")
    print(f"{name}: ended with 0 after SIGTERM")
