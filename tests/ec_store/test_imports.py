"""Imports of the store: only its server, `ec-store serve`, needs aiohttp."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ec_store

PACKAGE = Path(ec_store.__file__).parent
SERVER = {"ec_store.serve", "ec_store.service"}
NO_AIOHTTP = "import sys\nsys.modules['aiohttp'] = None\n"
NOT_FROM_THE_STORE = """
import builtins, sys
imports = builtins.__import__
def checked(name, globals=None, *rest, **keywords):
    importer = (globals or {}).get("__name__", "")
    assert not (importer.startswith("ec_store") and name.startswith("aiohttp")), importer
    return imports(name, globals, *rest, **keywords)
builtins.__import__ = checked
"""  # vLLM imports aiohttp itself


def modules() -> list[str]:
    paths = PACKAGE.rglob("*.py")
    files = [path.relative_to(PACKAGE.parent).with_suffix("") for path in paths]
    return [".".join(file.parts) for file in files if file.name != "__init__"]


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def needs_vllm(name: str) -> bool:
    return name.startswith("ec_store.vllm_connector")


def needs_torch(name: str) -> bool:
    return name.startswith("ec_store.engine")


def test_store_and_its_backends_import_without_aiohttp() -> None:
    names = [
        name
        for name in modules()
        if name not in SERVER and not needs_vllm(name) and not needs_torch(name)
    ]
    assert {"ec_store.disk.store", "ec_store.redis.store", "ec_store.arena.store"} <= {*names}

    assert run(f"{NO_AIOHTTP}import {', '.join(names)}\nprint('ok')") == "ok\n"


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_part_for_engines_imports_without_aiohttp() -> None:
    names = [name for name in modules() if needs_torch(name)]
    assert "ec_store.engine.fetcher" in names

    assert run(f"{NO_AIOHTTP}import {', '.join(names)}\nprint('ok')") == "ok\n"


@pytest.mark.full
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_connector_imports_no_aiohttp() -> None:
    names = [name for name in modules() if needs_vllm(name)]
    assert "ec_store.vllm_connector.connector" in names

    assert run(f"{NOT_FROM_THE_STORE}import {', '.join(names)}\nprint('ok')").endswith("ok\n")


def test_commands_other_than_serve_run_without_aiohttp(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    commands = (
        ("configure", url, "--ttl", "1d"),
        ("stat", url),
        ("ls", url),
        ("verify", url),
        ("gc", url),
        ("purge", url, "--namespace", "ns"),
    )
    for command in commands:
        code = f"{NO_AIOHTTP}from ec_store.__main__ import main\nmain(sys.argv[1:])"
        run(code, *command)
