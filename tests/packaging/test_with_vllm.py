"""The wheels beside vLLM, without the checkout: the connector, and `epd up`."""

import re
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from scripts.ports import free_ports
from tests.e2e.asking import picture
from tests.e2e.stacks import VISION
from tests.packaging.environments import Environment, environ, needs_wheels, wheel
from tests.vllm_parser import needs_vllm

pytestmark = [needs_wheels, needs_vllm, pytest.mark.full]

LOAD = """
import builtins, json, sys
from importlib.util import find_spec

importers, imports = set(), builtins.__import__
def recorded(name, globals=None, *rest, **keywords):
    if name.partition(".")[0] == "aiohttp":
        importers.add((globals or {}).get("__name__", "").partition(".")[0])
    return imports(name, globals, *rest, **keywords)
builtins.__import__ = recorded

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.engine.arg_utils import EngineArgs

model, store = sys.argv[1:]
config = EngineArgs(
    model=model,
    dtype="float32",
    enforce_eager=True,
    ec_transfer_config={
        "ec_connector": "ECStoreConnector",
        "ec_connector_module_path": "ec_store.vllm_connector",
        "ec_connector_extra_config": {"store": store},
        "ec_role": "ec_both",
    },
).create_engine_config()
connector = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
result = {
    "class": type(connector).__name__,
    "file": sys.modules["ec_store"].__file__,
    "proxy": find_spec("epd") is not None or "epd" in sys.modules,
    "importers of aiohttp": sorted(importers),
}
connector.shutdown()
print("RESULT", json.dumps(result))
"""


def test_the_connector_of_the_store_alone_loads_in_vllm_without_the_proxy(
    models: Path, tmp_path: Path
) -> None:
    environment = Environment(tmp_path / "engine")
    environment.install(wheel("ec_store"), dependencies=False)
    environment.add_packages_of_this_python()
    ran = environment.run(
        "python", "-c", LOAD, str(models / VISION), f"file://{tmp_path}/store", check=False
    )
    assert ran.returncode == 0, ran.stderr
    [result] = [line for line in ran.stdout.splitlines() if line.startswith("RESULT")]

    assert '"class": "ECStoreConnector"' in result
    assert f'"file": "{environment.folder}/lib/' in result
    assert '"proxy": false' in result
    importers = re.search(r'aiohttp": \[(.*)\]', result)
    assert importers is not None
    assert "vllm" in importers[1]
    assert "ec_store" not in importers[1]


def test_epd_up_serves_a_generated_model_without_a_checkout(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "proxy")
    environment.install(wheel("ec_store"), wheel("epd_proxy"), dependencies=False)
    environment.add_packages_of_this_python()
    flags = ("port", "encode-port", "prefill-decode-port", "ec-store-port")
    ports = zip(flags, free_ports(len(flags)), strict=True)
    command = [
        *(str(environment.folder / "bin" / "epd"), "up", "--device", "cpu", "--generate", "tiny"),
        *(f"--{flag}={port}" for flag, port in ports),
    ]
    body = {
        "messages": [
            {"role": "user", "content": [picture("cat.jpg"), {"type": "text", "text": "What?"}]}
        ],
        "max_tokens": 4,
    }
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environ() | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as up:
        assert up.stdout is not None
        printed: list[str] = []
        try:
            for line in up.stdout:
                printed.append(line)
                if found := re.fullmatch(r"ready: (http://127\.0\.0\.1:\d+)\n", line):
                    break
            assert found is not None, "".join(printed)
            replies = [
                httpx.post(f"{found[1]}/v1/chat/completions", json=body, timeout=60)
                for _ in range(2)
            ]
        finally:
            up.send_signal(signal.SIGINT)
        printed.append(up.stdout.read())

    assert [reply.status_code for reply in replies] == [200, 200]
    assert [reply.headers["x-epd-items"] for reply in replies] == [
        "hit=0,encoded=1,local=0",
        "hit=1,encoded=0,local=0",
    ]
    assert up.returncode == 0
    assert (tmp_path / "cache" / "epd" / "models" / "tiny" / "config.json").is_file()
