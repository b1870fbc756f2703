"""Part of a model's configuration files that encoder outputs depend on. No I/O."""

from collections.abc import Mapping
from typing import Any

NOT_OF_THE_MODEL = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Keys of a configuration's source, of the library that wrote it, and of values that the engine's
own options provide more precisely."""

QUANTIZATION = frozenset({"compression_config", "quantization_config"})
"""Keys that describe the quantisation of a checkpoint."""

LANGUAGE = frozenset(
    {
        "code2wav_config",
        "language_config",
        "llm_config",
        "talker_config",
        "text_config",
        "token2wav_config",
    }
)
"""Keys of the parts of a configuration that do not concern the encoder."""


def without(config: Any, keys: frozenset[str]) -> Any:
    """Return a parsed JSON document without these keys, at any depth."""
    if isinstance(config, Mapping):
        return {key: without(value, keys) for key, value in config.items() if key not in keys}
    if isinstance(config, list | tuple):
        return [without(value, keys) for value in config]
    return config


def has_any(config: Any, keys: frozenset[str]) -> bool:
    """Return whether a parsed JSON document has one of these keys with a value, at any depth."""
    if isinstance(config, Mapping):
        return any(
            (key in keys and bool(value)) or has_any(value, keys) for key, value in config.items()
        )
    return isinstance(config, list | tuple) and any(has_any(value, keys) for value in config)
