"""Whether vLLM can run a model's encoder apart, by its `config.json`.

A configuration that is inconclusive raises no objection: vLLM decides when it starts. vLLM's list
of text-only architectures is read from its source, without an import of vLLM.
"""

import ast
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path

from epd.tools.model_config import MEDIA_WORDS, Config, text_config

REGISTRY = Path("model_executor", "models", "registry.py")
"""File with vLLM's list of model classes, relative to its package."""
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


def why_unservable(config: Config, text_only: Collection[str]) -> str | None:
    """Return why an encode instance cannot serve the model; None: it can, or this is not known.

    `text_only` has vLLM's architectures that accept only text.
    """
    architectures = _architectures(config)
    named = ", ".join(sorted(architectures)) or config.get("model_type", "model")
    seq2seq = any(part.get("is_encoder_decoder") is True for part in (config, text_config(config)))
    if architectures & ENCODER_DECODERS or (seq2seq and architectures.isdisjoint(text_only)):
        return f"is an encoder-decoder model ({named}), and vLLM cannot run its encoder apart"
    names_media = any(word in key for key in config for word in MEDIA_WORDS)
    if architectures and architectures <= set(text_only) and not names_media:
        return f"accepts only text ({named}), so it has no encoder to run apart"
    return None


def _architectures(config: Config) -> set[str]:
    named = config.get("architectures")
    return {name for name in named if isinstance(name, str)} if isinstance(named, list) else set()


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
