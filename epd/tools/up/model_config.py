"""Model's `config.json`: whether vLLM can run the model's encoder apart.

A configuration that is inconclusive, or cannot be read, raises no objection: vLLM decides when it
starts. vLLM's list of text-only architectures is read from its source, without an import of vLLM.
"""

import ast
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from epd.tools.up.vllm_flags import flag_value

Config = Mapping[str, Any]

ENCODER_DECODERS = frozenset(
    {
        "CohereAsrForConditionalGeneration",
        "NemotronParseForConditionalGeneration",
        "RadioMBartPrefixForCausalLM",
        "WhisperForConditionalGeneration",
    }
)
"""Encoder-decoder models of vLLM 0.32 and 0.33 (`vllm/model_executor/models/registry.py`). Their
decoders attend to the encoder's output, which has no placeholders in the prompt, and vLLM has no
chat route for them, which encode requests need."""

MEDIA_WORDS = ("audio", "image", "img", "multimodal", "speech", "video", "vision", "visual")
"""Words in a configuration's keys that suggest an encoder, whatever the model's class."""


def why_unservable(config: Config, text_only: Collection[str]) -> str | None:
    """Return why an encode instance cannot serve the model; None: it can, or this is not known.

    `text_only` has vLLM's architectures that accept only text.
    """
    architectures = _architectures(config)
    named = ", ".join(sorted(architectures)) or config.get("model_type", "model")
    seq2seq = any(part.get("is_encoder_decoder") is True for part in _with_text_config(config))
    if architectures & ENCODER_DECODERS or (seq2seq and architectures.isdisjoint(text_only)):
        return f"is an encoder-decoder model ({named}), and vLLM cannot run its encoder apart"
    names_media = any(word in key for key in config for word in MEDIA_WORDS)
    if architectures and architectures <= set(text_only) and not names_media:
        return f"accepts only text ({named}), so it has no encoder to run apart"
    return None


def _architectures(config: Config) -> set[str]:
    named = config.get("architectures")
    return {name for name in named if isinstance(name, str)} if isinstance(named, list) else set()


def _with_text_config(config: Config) -> Iterator[Config]:
    """Yield the configuration and its parts that describe a language model."""
    yield config
    for key in ("text_config", "llm_config", "thinker_config"):
        if isinstance(part := config.get(key), Mapping):
            yield from _with_text_config(part)


FETCH_TIMEOUT_S = 1.5
"""Time that the start waits for the hub. Without an answer, vLLM decides as it loads the model."""

REGISTRY = Path("model_executor", "models", "registry.py")
"""File with vLLM's list of model classes, relative to its package."""


def config_path(model: str, flags: Sequence[str], environ: Mapping[str, str]) -> Path | None:
    """Return the model's `config.json`; None: not available within `FETCH_TIMEOUT_S`.

    `model` is a directory, or a name on the hub, where `--revision` of vLLM's flags selects one of
    several configurations.
    """
    if Path(model).is_dir():
        return Path(model, "config.json")
    if environ.get("VLLM_USE_MODELSCOPE", "0").lower() in {"1", "true"} or "://" in model:
        return None
    return _of_hub(model, flag_value(flags, "--revision"))


def read_config(path: Path | None) -> Any:
    """Return the configuration in a file; None: there is none, or it cannot be read."""
    if path is None:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # vLLM reports it with a better reason
        return None
    return found if isinstance(found, dict) else None


def _of_hub(model: str, revision: str | None) -> Path | None:
    """Return the file in the hub's cache; fetch it if it is missing."""
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
    except ImportError:  # part of vLLM, which may be in another environment
        return None
    set_verbosity_error()  # its retries continue while the engines start
    with suppress(ValueError, OSError, HfHubHTTPError):  # a bad name, no network, no such model
        cached = try_to_load_from_cache(model, "config.json", revision=revision)
        if not isinstance(cached, str):
            cached = hf_hub_download(
                model, "config.json", revision=revision, etag_timeout=FETCH_TIMEOUT_S
            )
        return Path(cached)
    return None


def text_architectures(package: Path | None = None) -> frozenset[str]:
    """Return vLLM's architectures that accept only text; empty: its list cannot be read.

    vLLM is not imported, because that takes seconds. `package` is the folder of its package; None:
    that of this process's environment.
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
    """Yield the name and the keys of each dictionary of a module."""
    for statement in registry.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)):
                constants = (key.value for key in keys if isinstance(key, ast.Constant))
                yield name, frozenset(key for key in constants if isinstance(key, str))
