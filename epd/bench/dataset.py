"""Data sets for `vllm bench serve`: VisionArena-Chat, and folders in its schema."""

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from epd.bench import pictures
from epd.bench.replays import REPLAYS, rng

HUB_NAME = "lmarena-ai/VisionArena-Chat"
VISION_ARENA = "visionarena"


class DatasetUnavailable(Exception):
    """Error: VisionArena-Chat cannot be read. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Data set of one run.

    Attributes:
        name: name in the results.
        path: folder, or name on the hub.
        trace: picture of each conversation, in the order of the requests.
    """

    name: str
    path: str
    trace: tuple[str, ...]

    @property
    def distinct(self) -> int:
        """Return the number of distinct pictures."""
        return len(set(self.trace))


def local(data_dir: Path, name: str, prompts: int, seed: int) -> Dataset:
    """Write a folder with the conversations of a replay; present pictures are kept.

    The folder is an image folder of Hugging Face: `load_dataset(folder)` returns the columns of
    VisionArena-Chat. vLLM reads `images[0]` and the first message of `conversation`.

    Raises:
        OSError: the folder cannot be written.
    """
    trace = REPLAYS[name](rng(seed, name), prompts)
    folder = data_dir / f"{name}-{seed}"
    train = folder / "train"
    (train / "pictures").mkdir(parents=True, exist_ok=True)
    for number in sorted(set(trace)):
        path = train / _file(number)
        if not path.exists():
            _publish(path, pictures.jpeg(rng(seed, name, "picture", number)))
    rows = (_row(f"{seed}/{name}/{at}", number) for at, number in enumerate(trace))
    _publish(train / "metadata.jsonl", b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return Dataset(name, str(folder), tuple(map(_file, trace)))


def vision_arena(prompts: int) -> Dataset:
    """Return the first conversations of VisionArena-Chat, with the digests of their pictures.

    Raises:
        DatasetUnavailable: the hub cannot be reached, or denies access.
    """
    try:
        _check_access()
        trace = tuple(islice(digests(HUB_NAME), prompts))
    except Exception as error:  # the type depends on the version of the HTTP library
        lines = str(error).strip().splitlines()
        reason = lines[-1] if lines else type(error).__name__
        raise DatasetUnavailable(f"VisionArena-Chat cannot be read: {reason}") from error
    return Dataset(VISION_ARENA, HUB_NAME, trace)


def _check_access() -> None:
    """Check the access with one request: `load_dataset` would retry for half a minute."""
    from huggingface_hub import HfApi  # noqa: PLC0415 - as below

    HfApi().auth_check(HUB_NAME, repo_type="dataset")


def digests(path: str) -> Iterator[str]:
    """Yield the SHA-256 of each picture that vLLM sends from a data set."""
    # Installed only in environments that run vLLM's benchmark.
    from datasets import load_dataset  # noqa: PLC0415

    logging.getLogger("datasets").setLevel(logging.ERROR)
    rows = load_dataset(path, split="train", streaming=True).select_columns("images")
    for row in rows.decode(enable=False):
        image: dict[str, Any] = row["images"][0]
        content = image["bytes"] or Path(image["path"]).read_bytes()
        yield hashlib.sha256(content).hexdigest()


def _row(name: str, number: int) -> dict[str, Any]:
    turns = pictures.conversation(rng(name))
    return {
        "conversation_id": hashlib.sha256(name.encode()).hexdigest()[:32],
        "images_file_names": [_file(number)],
        "num_turns": len(turns) // 2,
        "conversation": turns,
    }


def _file(number: int) -> str:
    return f"pictures/{number:06}.jpg"


def _publish(path: Path, content: bytes) -> None:
    """Write a file atomically: another run may read or write it at the same time."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_bytes(content)
    staging.replace(path)
