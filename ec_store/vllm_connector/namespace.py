"""Namespace of an engine's entries: it determines which engines share encoder outputs.

It is derived from the encoder's weights, the parts of the model's and the processor's configuration
that encoder outputs depend on, and the formats of outputs and entries.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import vllm
from vllm import envs
from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict, try_get_local_file

from ec_store.engine.fingerprint import Weights, fingerprint
from ec_store.engine.tensors import DTYPES
from ec_store.entry import FORMAT
from ec_store.vllm_connector.checkpoint import PATTERNS, weight_files

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


logger = logging.getLogger("vllm.ec_store")

ENCODER_OPTIONS = (
    "media_io_kwargs",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)
"""Fields of vLLM's `MultiModalConfig` that change encoder outputs by more than rounding."""

QUANT_FILE = "hf_quant_config.json"
CONFIG_FILES = {
    "auto": ("config.json", "params.json", QUANT_FILE),
    "hf": ("config.json", QUANT_FILE),
    "mistral": ("config.json", "params.json", QUANT_FILE),
}
"""Files from which vLLM reads a model's configuration, by `--config-format`."""

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files that define how media become the encoder's input."""

LAYOUTS = {"0.32": 1}
"""Layout of encoder outputs (rows, columns, order of DeepStack levels) by vLLM release.

To add a release, compare its model classes with those of the adjacent releases. Give it the same
number if they agree, and the next number if the layout of any model's outputs differs. Releases
with one number share entries. A release that is not listed shares entries only with itself: an
upgrade then costs encodes, and never causes wrong answers.
"""


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


class _NamedWeights(NamedTuple):
    """Identity of weights that cannot be read here: their configured name and revision."""

    source: str
    revision: str | None = None
    apart: bool = False
    plain: bool = False


def namespace_of(vllm_config: Any, generation: int) -> str:
    """Return the namespace: equal exactly for engines that may share encoder outputs.

    It covers a sample of the encoder's weights, the encoder's and the processor's configuration,
    dtype, quantisation, and the formats of outputs and entries. Engines of different generations,
    numbers that the operator chooses, share nothing.

    vLLM creates the workers' connectors before it builds the model, the scheduler's connector
    afterwards, and its metrics last. Nothing that a model class may modify is used here, so that
    all processes of an engine return the same namespace.
    """
    model = vllm_config.model_config
    multimodal = model.multimodal_config
    files = configuration(model)
    weights = _weights(model, vllm_config.load_config)
    dropped = NOT_OF_THE_MODEL | QUANTIZATION | (LANGUAGE if weights.apart else frozenset())
    facts = {
        "format": FORMAT,
        "layout": layout_of(vllm.__version__),
        "weights": weights.digest if isinstance(weights, Weights) else list(weights),
        "loader": _other_loader(vllm_config.load_config),
        "quantization": _quantization(model, files, weights),
        "config": without({name: files[name] for name in files if name != QUANT_FILE}, dropped),
        "overrides": without(_overrides(model.hf_overrides), dropped),
        "processor": without(_processor_files(model), NOT_OF_THE_MODEL),
        "dtype": DTYPES[model.dtype],
        "mm_processor_kwargs": _processor_options(multimodal),
        "encoder": {option: getattr(multimodal, option, None) for option in ENCODER_OPTIONS},
        "video_loader": envs.VLLM_VIDEO_LOADER_BACKEND,
    }
    encoded = orjson.dumps(
        facts, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
    )
    name = next(
        (str(content["model_type"]) for content in files.values() if "model_type" in content),
        "model",
    )
    return f"{name}@{generation}:{hashlib.sha256(encoded).hexdigest()[:16]}"


def layout_of(version: str) -> int | str:
    """Return the layout of a vLLM release, see `LAYOUTS`."""
    release = ".".join(version.split(".")[:2])
    return LAYOUTS.get(release, release)


def configuration(model: Any) -> dict[str, dict[str, Any]]:
    """Return the model's configuration by file, as it was before a model class could modify it.

    The files are preferred to the configuration that transformers parses: that one also changes
    with each version of transformers, which adds defaults. If vLLM's files are not on this machine
    (another source of models, a parser of a plugin), the configuration is parsed again from its
    source.
    """
    source = model.hf_config_path or model.model
    revision = getattr(model, "_hf_config_revision", None) or model.revision
    # A branch may move between two reads; the commit that vLLM has resolved it to does not.
    commit = getattr(revision, "resolved", revision)
    found = {}
    for file in CONFIG_FILES.get(model.config_format, ()):
        path = try_get_local_file(source, file, commit)
        if isinstance(path, Path):
            found[file] = json.loads(path.read_text(encoding="utf-8"))
    return found or {"parsed": _parsed_again(model, source, revision)}


def _parsed_again(model: Any, source: str, revision: str | None) -> dict[str, Any]:
    try:
        config = get_config(
            source,
            model.trust_remote_code,
            revision,
            model.code_revision,
            model.config_format,
            token=model.hf_token,
        )
    except Exception as error:  # noqa: BLE001 - raised by a library or a plugin; logged
        config = model.hf_config
        logger.warning(
            "the configuration of %s could not be read again: %s; the namespace is derived from "
            "the configuration in memory, which a model class may change. Put config.json beside "
            "the weights on every host if this engine logs two namespaces.",
            source,
            error,
        )
    return dict(config.to_dict())


def _processor_files(model: Any) -> dict[str, Any]:
    path = Path(model.model)
    source = str(path.parent if path.is_file() else model.model)
    commit = getattr(model.revision, "resolved", model.revision)
    return {name: get_hf_file_to_dict(name, source, commit) for name in PROCESSOR_FILES}


def _weights(model: Any, load: Any) -> Weights | _NamedWeights:
    """Return the fingerprint of the weights, or their name if they cannot be read here."""
    source = model.model_weights or model.model
    if load.load_format == "dummy":  # equal for all engines of one configuration
        return _NamedWeights("")
    reason = "they are not in files on this machine"
    try:
        if files := weight_files(model, load):
            return fingerprint(files)
    except Exception as error:  # noqa: BLE001 - raised by a hub's library or a loader; logged
        reason = f"{error}"
    logger.warning(
        "the weights of %s could not be compared: %s. Engines share encoder outputs where this "
        "name, the revision and the configuration are equal. Raise the option generation when "
        "the weights change.",
        source,
        reason,
    )
    return _NamedWeights(source, model.revision)


def _other_loader(load: Any) -> list[Any] | None:
    """Return a loader that may read more than the checkpoint's files, with its options."""
    if load.load_format in PATTERNS:
        return None
    return [load.load_format, load.model_loader_extra_config]


def _quantization(model: Any, files: dict[str, Any], weights: Weights | _NamedWeights) -> Any:
    """Return the quantisation of the encoder; None if it is not quantised.

    In a quantised checkpoint, the encoder's own tensors show whether it is quantised. A checkpoint
    that is not quantised may be quantised by vLLM while it is loaded, for some models including the
    encoder.
    """
    stated = {name: value for name, value in files.items() if has_any(value, QUANTIZATION)}
    by_itself = QUANT_FILE in files or bool(stated)
    if model.quantization is None and not by_itself:
        return None
    online = getattr(model, "quantization_config", None)
    if by_itself and online is None and weights.apart and weights.plain:
        return None
    return [model.quantization, online, files.get(QUANT_FILE), stated]


def _overrides(overrides: Any) -> Any:
    """Return `--hf-overrides`; a function by its name, since its address differs by process."""
    if callable(overrides):
        function = getattr(overrides, "__qualname__", type(overrides).__qualname__)
        return f"{overrides.__module__}.{function}"
    return overrides


def _processor_options(multimodal: Any) -> dict[str, Any]:
    options = (multimodal and multimodal.mm_processor_kwargs) or {}
    # vLLM sets the device by itself, on encode instances only, and it changes outputs only by
    # rounding.
    return {key: value for key, value in options.items() if key != "device"}
