"""Model's `config.json`: where it is, and its fields. All are optional.

A configuration that cannot be read raises no error: vLLM has a better one when it starts.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

Config = Mapping[str, Any]
Fetch = Callable[[str, str | None], Path | None]
"""Function that returns the file of a model's name on the hub and a revision."""

FETCH_TIMEOUT_S = 1.5
"""Time that the start waits for the hub. Without an answer, vLLM decides as it loads the model."""

VALUE_BYTES = 2
"""Bytes of a value: weights and encoder outputs are in bfloat16 or float16 unless quantized."""

MEDIA_WORDS = ("audio", "image", "img", "multimodal", "speech", "video", "vision", "visual")
"""Words in a configuration's keys that suggest an encoder, whatever the model's class."""


def fetch_config(model: str, revision: str | None) -> Path | None:
    """Return the path of a model's `config.json` in the hub's cache; None without it."""
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


def config_path(
    model: str, revision: str | None, environ: Mapping[str, str], fetch: Fetch = fetch_config
) -> Path | None:
    """Return the model's `config.json`; None: not available within `FETCH_TIMEOUT_S`.

    `model` is a directory, or a name on the hub, where `revision` selects one of several
    configurations.
    """
    if Path(model).is_dir():
        return Path(model, "config.json")
    if environ.get("VLLM_USE_MODELSCOPE", "0").lower() in {"1", "true"} or "://" in model:
        return None
    fetched: SimpleQueue[Path | None] = SimpleQueue()
    Thread(target=lambda: fetched.put(fetch(model, revision)), daemon=True).start()
    try:
        return fetched.get(timeout=FETCH_TIMEOUT_S)
    except Empty:
        return None


def read_config(path: Path | None) -> Any:
    """Return the configuration in a file; None: there is none, or it cannot be read."""
    if path is None:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # vLLM reports it with a better reason
        return None
    return found if isinstance(found, dict) else None


def parts(config: Config, *names: str) -> Iterator[Config]:
    """Yield those of these fields that are configurations of their own."""
    for name in names:
        if isinstance(part := config.get(name), Mapping):
            yield part


def text_config(config: Config) -> Config:
    """Return the innermost part that describes the language model."""
    for part in parts(config, "text_config", "llm_config", "thinker_config"):
        return text_config(part)
    return config


def number(config: Config, *names: str) -> float:
    """Return the first of these fields that is a number other than 0; 0: there is none."""
    found = (config.get(name) for name in names)
    return next((value for value in found if type(value) in {int, float} and value), 0)


def outputs_per_token(vision: Config) -> int:
    """Return the vectors that a vision tower has for each token: DeepStack has several."""
    levels = vision.get("deepstack_visual_indexes")
    return 1 + (len(levels) if isinstance(levels, list) else 0)
