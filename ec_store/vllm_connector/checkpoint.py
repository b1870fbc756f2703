"""Location of an engine's checkpoint files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.weight_utils import (
    filter_duplicate_safetensors_files,
    filter_files_not_needed_for_inference,
    maybe_download_from_modelscope,
)

SAFETENSORS = ("*.safetensors",)
MISTRAL = ("consolidated*.safetensors",)
PATTERNS = {
    "auto": (*MISTRAL, *SAFETENSORS, "*.bin", "*.pt"),
    "hf": (*SAFETENSORS, "*.bin", "*.pt"),
    "safetensors": SAFETENSORS,
    "fastsafetensors": SAFETENSORS,
    "instanttensor": SAFETENSORS,
    "runai_streamer": SAFETENSORS,
    "runai_streamer_sharded": SAFETENSORS,
    "sharded_state": SAFETENSORS,
    "mistral": MISTRAL,
    "npcache": ("*.bin",),
    "pt": ("*.pt",),
}
"""Patterns of the files that vLLM loads, by `--load-format`; the first pattern that matches any
file counts (`DefaultModelLoader._prepare_weights`,
vllm/model_executor/model_loader/default_loader.py)."""

UNKNOWN = (*SAFETENSORS, "*.bin", "*.pt", "*.gguf")
"""Patterns of the files that another loader, such as a plugin's, is likely to load."""

INDEX = "model.safetensors.index.json"
CONSOLIDATED_INDEX = "consolidated.safetensors.index.json"

WHOLE = frozenset({"model.safetensors", "consolidated.safetensors", "pytorch_model.bin"})
"""Names of checkpoints in one file: those in several files have an index."""


def weight_files(model: Any, load: Any) -> Sequence[Path]:
    """Return the files that an engine's weights are loaded from.

    An incomplete model of the hub is downloaded first, as vLLM itself would do next. Workers create
    their connectors before they load the weights, and must see the same files as the scheduler,
    which does so afterwards.

    Returns:
        No files if the weights are not in files of this machine: object storage, random weights.

    Raises:
        Exception: any error of vLLM's downloads.
    """
    source = model.model_weights or model.model
    path = Path(source)
    if path.is_file():  # a GGUF; its encoder is in another file beside it
        return [path, *sorted(set(path.parent.glob("*mmproj*.gguf")) - {path})]
    if load.load_format == "dummy" or "://" in source:
        return ()
    folder = path if path.is_dir() else maybe_download_from_modelscope(source, model.revision)
    if folder is not None:
        return _loaded(Path(folder), load.load_format)
    files = _downloaded(model, load)
    if not _is_complete(files):
        get_model_loader(load).download_model(model)
        files = _downloaded(model, load)
    return files


def _downloaded(model: Any, load: Any) -> Sequence[Path]:
    # A branch may move between two reads; the commit that vLLM has resolved it to does not.
    commit = getattr(model.revision, "resolved", model.revision)
    try:
        folder = snapshot_download(
            model.model, revision=commit, cache_dir=load.download_dir, local_files_only=True
        )
    except LocalEntryNotFoundError:
        return ()
    return _loaded(Path(folder), load.load_format)


def _loaded(folder: Path, load_format: str) -> Sequence[Path]:
    """Return the files of a folder that vLLM loads; none if a needed file is missing."""
    for pattern in PATTERNS.get(load_format, UNKNOWN):
        files = [str(file) for file in sorted(folder.glob(pattern))]
        if files and pattern.endswith(".safetensors"):
            index = CONSOLIDATED_INDEX if pattern in MISTRAL else INDEX
            try:
                files = filter_duplicate_safetensors_files(files, str(folder), index)
            except FileNotFoundError:
                return ()
        elif files:
            files = filter_files_not_needed_for_inference(files)
        if files:
            return [Path(file) for file in files]
    return ()


def _is_complete(files: Sequence[Path]) -> bool:
    """Return whether a download is complete, as far as the files show without the network."""
    if not files:
        return False
    folder = files[0].parent
    indexed = any((folder / index).is_file() for index in (INDEX, CONSOLIDATED_INDEX))
    return indexed or (len(files) == 1 and files[0].name in WHOLE)
