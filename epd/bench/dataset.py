"""The data sets that `vllm bench serve` reads: VisionArena-Chat, and folders in its schema."""

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
    """VisionArena-Chat cannot be read. Its message says why."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """What one run asks about.

    Attributes:
        name: what results call it.
        path: a folder, or its name on the hub.
        trace: the picture of each conversation, in the order in which they are sent.
    """

    name: str
    path: str
    trace: tuple[str, ...]

    @property
    def distinct(self) -> int:
        """How many pictures there are."""
        return len(set(self.trace))


def local(data_dir: Path, name: str, prompts: int, seed: int) -> Dataset:
    """A folder with the conversations of a replay; pictures that it has already are kept.

    It is what Hugging Face calls an image folder: `load_dataset(folder)` gives the columns that
    VisionArena-Chat has, of which vLLM reads `images[0]` and the first message of `conversation`.

    Raises:
        OSError: it cannot be written.
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
    """The first conversations of VisionArena-Chat; their pictures are read, to tell them apart.

    Raises:
        DatasetUnavailable: the hub cannot be reached, or does not let us read it.
    """
    try:
        _check_access()
        trace = tuple(islice(digests(HUB_NAME), prompts))
    except Exception as error:  # what a library's HTTP library raises changes with its version
        lines = str(error).strip().splitlines()
        reason = lines[-1] if lines else type(error).__name__
        raise DatasetUnavailable(f"VisionArena-Chat cannot be read: {reason}") from error
    return Dataset(VISION_ARENA, HUB_NAME, trace)


def _check_access() -> None:
    """Ask once: whoever loads a data set asks for half a minute before they believe it."""
    from huggingface_hub import HfApi  # noqa: PLC0415 - as below

    HfApi().auth_check(HUB_NAME, repo_type="dataset")


def digests(path: str) -> Iterator[str]:
    """The pictures that vLLM sends of a data set, by their content."""
    # Only environments that run vLLM's benchmark have it.
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
    """Write a file that another run may be reading or writing."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_bytes(content)
    staging.replace(path)
