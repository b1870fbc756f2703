"""Checkpoint files of an engine: their location, and a fingerprint of the weights in them.

The fingerprint is made of a sample of each file. Weights that are not in files of this machine have
none.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

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
    """Return a hub model's files, as `_loaded`; none if no part of it is on this machine."""
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


WINDOW_BYTES = 4096
"""Length of one sample in bytes."""

WINDOWS = 3
"""Number of samples of a tensor: its first, middle and last bytes. A smaller tensor is read
whole."""

MANY_TENSORS = 4096
"""Number of tensors above which each has one sample, from its middle. Only a mixture of experts has
as many, if its language model cannot be separated from the encoder."""

STEP_BYTES = 4 * 1024**2
"""Distance in bytes between two samples of a file without a safetensors header."""

TAIL_BYTES = 1024**2
"""Bytes that are read at the end of such a file. The files that `torch.save` writes are zip
archives: their directory, with a CRC-32 of each tensor, is at the end."""

MAX_STEPS = 4096
"""Upper bound of the samples of such a file."""

MAX_HEADER_BYTES = 100_000_000
"""Longest header of a safetensors file in bytes, the limit of the safetensors library."""

LANGUAGE = re.compile(
    r"(model\.|thinker\.)*"
    r"(language_model|language|llm|text_model|lm_head|talker|token2wav|code2wav)\."
    r"|(thinker\.)?model\.(layers|norm)\."
)
"""Names of tensors that certainly do not belong to the encoder: those of the language model and of
speech output.

All other tensors count as a part of the encoder. A wrong guess costs hits; it never causes a wrong
answer.
"""

MISTRAL_LANGUAGE = re.compile(r"(layers|norm|output)\.")
"""Names of the same tensors in checkpoints in Mistral's format, which have a tensor
`tok_embeddings.weight`."""

INPUT_EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|tok_embeddings|word_embeddings|wte)\.")
"""Names of text embeddings. Some encoder outputs contain these: those of videos with pruning in
Qwen3-VL and Nemotron Nano VL, and all of Molmo 2 and Moondream 3."""

PLAIN = frozenset({"BF16", "F16", "F32", "F64", "I64", "BOOL"})
"""Safetensors dtypes of tensors that are not quantised; I64 and BOOL are those of buffers."""


class Weights(NamedTuple):
    """Identity of the weights that compute encoder outputs.

    Attributes:
        digest: digest of names, dtypes, shapes and sampled bytes, independent of the files' names.
        apart: whether the language model's tensors were left out.
        plain: whether no tensor of the encoder is quantised.
    """

    digest: str
    apart: bool
    plain: bool


class Tensor(NamedTuple):
    """Tensor of a safetensors file; `begin` and `end` are offsets in bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def fingerprint(paths: Iterable[Path]) -> Weights:
    """Return the fingerprint of a checkpoint.

    Files that end in `.safetensors` are sampled by tensor, others by position. The fingerprint does
    not depend on names and order of the files: one checkpoint has the same fingerprint in two and
    in three shards.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file that ends in `.safetensors` has no valid header.
    """
    opened: list[tuple[int, list[Tensor] | None]] = []
    with ExitStack() as stack:
        for path in paths:
            file = stack.enter_context(path.open("rb", buffering=0)).fileno()
            opened.append((file, _tensors(file, path) if path.suffix == ".safetensors" else None))
        return _fingerprint(opened)


def encoder_names(names: Iterable[str]) -> frozenset[str]:
    """Return the names of the tensors that encoder outputs may depend on: all but `LANGUAGE`.

    Returns:
        All names if only text embeddings would remain.
    """
    everything = frozenset(names)
    mistral = "tok_embeddings.weight" in everything
    kept = frozenset(
        name
        for name in everything
        if INPUT_EMBEDDINGS.search(name)
        or not (LANGUAGE.match(name) or (mistral and MISTRAL_LANGUAGE.match(name)))
    )
    return kept if any(not INPUT_EMBEDDINGS.search(name) for name in kept) else everything


def _fingerprint(opened: Sequence[tuple[int, list[Tensor] | None]]) -> Weights:
    names = frozenset(tensor.name for _, tensors in opened for tensor in tensors or ())
    wanted = encoder_names(names)
    windows = WINDOWS if len(wanted) <= MANY_TENSORS else 1
    lines, plain = [], True
    for file, tensors in opened:
        if tensors is None:
            size = os.fstat(file).st_size
            lines.append(f"{size} {_sampled(file, _steps(size))}")
            plain = False
            continue
        for tensor in tensors:
            if tensor.name in wanted:
                plain = plain and tensor.dtype in PLAIN
                sample = _sampled(file, _windows(tensor.begin, tensor.end, windows))
                lines.append(json.dumps([tensor.name, tensor.dtype, tensor.shape, sample]))
    return Weights(
        digest=hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest(),
        apart=bool(names) and wanted != names,
        plain=plain,
    )


def _sampled(file: int, windows: Iterable[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    for begin, end in windows:
        digest.update(os.pread(file, end - begin, begin))
    return digest.hexdigest()


def _windows(begin: int, end: int, windows: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a tensor that are sampled."""
    length = end - begin
    middle = begin + (length - WINDOW_BYTES) // 2
    if length <= windows * WINDOW_BYTES:
        yield begin, end
    elif windows == 1:
        yield middle, middle + WINDOW_BYTES
    else:
        yield begin, begin + WINDOW_BYTES
        yield middle, middle + WINDOW_BYTES
        yield end - WINDOW_BYTES, end


def _steps(size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file without a safetensors header that are sampled."""
    step = max(STEP_BYTES, size // MAX_STEPS)
    for begin in range(0, max(size - TAIL_BYTES, 0), step):
        yield begin, min(begin + WINDOW_BYTES, size)
    yield max(size - TAIL_BYTES, 0), size


def _tensors(file: int, path: Path) -> list[Tensor]:
    """Return the tensors in the header of a safetensors file; ValueError if it is invalid."""
    size = os.fstat(file).st_size
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"{path} is not a safetensors file")
    try:
        header = json.loads(os.pread(file, length, 8))
        return [
            _tensor(name, entry, 8 + length, size)
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the header of {path} cannot be read: {error!r}") from error


def _tensor(name: str, entry: dict[str, Any], payload: int, size: int) -> Tensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
            0 <= begin <= end <= size - payload
        ):
            return Tensor(name, dtype, tuple(shape), payload + begin, payload + end)
    raise ValueError(f"{name} has no valid dtype, shape and data_offsets")
