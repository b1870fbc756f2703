"""Real engines are registered and removed while requests run."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import openai

from epd.routing.instances import Role
from epd.tools.up.process import STOP_TIMEOUT_S, Process, stop, wait_until_ready
from scripts.forked import ForkedProcess
from scripts.ports import free_ports
from tests.e2e.asking import ask
from tests.e2e.load import ASKED, CLIENTS, QUESTIONS, Load, until
from tests.e2e.served import Served, metric

KEY = "admin-key-0123456789"
START_S = 600.0


@contextmanager
def started(*processes: Process) -> Iterator[None]:
    try:
        wait_until_ready(processes, START_S, print)
        yield
    finally:
        stop((processes, STOP_TIMEOUT_S))


def proxy(stack: Served, folder: Path, port: int) -> Process:
    """Return a second proxy of the same store, without engines."""
    command = (
        *(sys.executable, "-m", "epd", "serve", "--host", "127.0.0.1", "--port", str(port)),
        *("--dynamic-registration", "--ec-store", stack.stack.store, "--ec-store-budget-s", "2"),
        *("--on-encode-failure", "fail", "--drain-delay-s", "0"),
    )
    environment = {"ADMIN_API_KEY": KEY}
    url = f"http://127.0.0.1:{port}"
    return Process("dynamic proxy", url, command, environment, folder / "proxy.log")


def test_an_encode_engine_is_added_and_another_removed_under_load(
    stack: Served, tmp_path: Path
) -> None:
    due = [ask(stack.baseline, stack.model, *question) for question in QUESTIONS]
    port, side_channel, of_proxy = free_ports(3)
    first, second = stack.encode, replace(stack.encode, port=port, side_channel_port=side_channel)
    engine = ForkedProcess(second.server(), tmp_path / "second.log")
    dynamic = proxy(stack, tmp_path, of_proxy)
    with (
        started(engine, dynamic),
        httpx.Client(base_url=dynamic.url, headers={"X-API-Key": KEY}, timeout=30) as admin,
        openai.OpenAI(base_url=f"{dynamic.url}/v1", api_key="k", max_retries=0) as client,
    ):

        def register(role: Role, url: str) -> None:
            said = admin.post("/instances", json={"role": role, "url": url})
            assert said.json() == {"registered": True}

        assert admin.get("/ready").status_code == 503
        for one in stack.stack.all_engines:
            register(one.role, one.url)
        load = Load(replace(stack, client=client), due)
        with load.running():
            load.ends(2 * CLIENTS)
            register(Role.ENCODE, second.url)
            asked = metric(second, ASKED)
            # The key decides which engine encodes a new picture: many may go to the first engine.
            until(lambda: metric(second, ASKED) > asked)
            removed = admin.delete("/instances", params={"url": first.url})
            assert removed.json() == {"removed": True}
            load.ends(2 * CLIENTS)
            rows = admin.get("/instances").json()["instances"]
            assert {row["url"] for row in rows if row["role"] == "encode"} == {second.url}
            asked = metric(first, ASKED)
            load.ends(4 * CLIENTS)
            assert metric(first, ASKED) == asked

    assert set(load.seen) == {"right"}
