"""Fingerprint of the weights in checkpoint files, made of a sample of each file."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

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
    step = max(STEP_BYTES, size // MAX_STEPS)
    for begin in range(0, max(size - TAIL_BYTES, 0), step):
        yield begin, min(begin + WINDOW_BYTES, size)
    yield max(size - TAIL_BYTES, 0), size


def _tensors(file: int, path: Path) -> list[Tensor]:
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
