"""Data sets for `vllm bench serve`: a file of generated questions and pictures."""

import base64
from dataclasses import dataclass
from pathlib import Path

import orjson

from epd.tools.bench.pictures import jpeg, question, rng
from epd.tools.bench.replays import REPLAYS


@dataclass(frozen=True, slots=True)
class Dataset:
    """Data set of one run: a file for vLLM, and the number of each request's picture in turn."""

    name: str
    path: str
    trace: tuple[int, ...]


def write_dataset(folder: Path, name: str, prompts: int, seed: int) -> Dataset:
    """Write the requests of a replay to a folder, as vLLM's `custom_image`.

    Each line has a prompt and a data URL, which vLLM sends unchanged; it would convert a picture of
    a file to PNG.
    """
    trace = REPLAYS[name](rng(seed, name), prompts)
    pictures = {number: _data_url(jpeg(rng(seed, name, "picture", number))) for number in {*trace}}
    path = folder / f"{name}.jsonl"
    with path.open("wb") as file:
        for at, number in enumerate(trace):
            asked = question(rng(f"{seed}/{name}/{at}"))
            row = {"prompt": asked, "image_files": [pictures[number]]}
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    return Dataset(name, str(path), tuple(trace))


def _data_url(content: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"
