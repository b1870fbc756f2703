"""A model's `config.json`, and the list of vLLM's architectures that take text alone."""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from epd.fleet.suitability import flag_value

FETCH_TIMEOUT_S = 1.5
"""How long the start waits for the hub. Without its answer vLLM decides, as it loads the model."""

REGISTRY = Path("model_executor", "models", "registry.py")
"""Where vLLM lists the classes it serves, from its package inwards."""


def model_config(model: str, flags: Sequence[str], environ: Mapping[str, str]) -> Any:
    """Return the model's configuration; None: it cannot be had within `FETCH_TIMEOUT_S`.

    Args:
        model: directory of the model, or its name on the hub.
        flags: flags of vLLM, of which `--revision` chooses among several configurations.
        environ: this process's environment.
    """
    path: Path | None = Path(model, "config.json")
    if not Path(model).is_dir():
        elsewhere = "://" in model or environ.get("VLLM_USE_MODELSCOPE", "0").lower() in {
            "1",
            "true",
        }
        path = None if elsewhere else _of_hub(model, flag_value(flags, "--revision"))
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path is not None else None
    except (OSError, ValueError):  # vLLM reports it, with a better reason than could be had here
        return None
    return found if isinstance(found, dict) else None


def _of_hub(model: str, revision: str | None) -> Path | None:
    """Return the file in the hub's cache, fetched where it is not there."""
    fetched: SimpleQueue[Path | None] = SimpleQueue()
    Thread(target=lambda: fetched.put(_fetched(model, revision)), daemon=True).start()
    try:
        return fetched.get(timeout=FETCH_TIMEOUT_S)
    except Empty:
        return None


def _fetched(model: str, revision: str | None) -> Path | None:
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache  # noqa: PLC0415
        from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415
        from huggingface_hub.utils.logging import set_verbosity_error  # noqa: PLC0415
    except ImportError:  # it comes with vLLM, which may be in another environment
        return None
    set_verbosity_error()  # its tries go on while the engines start
    with suppress(ValueError, OSError, HfHubHTTPError):  # a bad name, no network, no such model
        cached = try_to_load_from_cache(model, "config.json", revision=revision)
        if not isinstance(cached, str):
            cached = hf_hub_download(
                model, "config.json", revision=revision, etag_timeout=FETCH_TIMEOUT_S
            )
        return Path(cached)
    return None


def text_architectures(package: Path | None = None) -> frozenset[str]:
    """Return vLLM's architectures that take text alone; empty where its list cannot be read.

    vLLM is not imported for it, which would take seconds.

    Args:
        package: the folder of vLLM's package; None: that of this process's environment.
    """
    package = _installed() if package is None else package
    if package is None:
        return frozenset()
    try:
        tables = dict(_tables(ast.parse((package / REGISTRY).read_text(encoding="utf-8"))))
    except (OSError, SyntaxError):
        return frozenset()
    with_media = tables.get("_MULTIMODAL_MODELS", frozenset())
    return tables.get("_TEXT_GENERATION_MODELS", frozenset()) - with_media


def _installed() -> Path | None:
    spec = find_spec("vllm")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _tables(registry: ast.Module) -> Iterator[tuple[str, frozenset[str]]]:
    """The dictionaries of a module, each by its name and with its keys."""
    for statement in registry.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)):
                constants = (key.value for key in keys if isinstance(key, ast.Constant))
                yield name, frozenset(key for key in constants if isinstance(key, str))
