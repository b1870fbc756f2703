"""Models with seeded random weights, for machines without a hub: a tiny one, and two of full size.

Modules other than this one need torch and transformers, which come with vLLM.
"""

import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

GENERATED: Mapping[str, str] = MappingProxyType(
    {
        "tiny": "qwen_vl.qwen2_5_vl",
        "qwen2.5-vl-7b": "full_size.qwen2_5_vl_7b",
        "qwen3-vl-8b": "full_size.qwen3_vl_8b",
    }
)
"""Module and function that build a model, by its name for `--generate`."""


def add_generate(parser: ArgumentParser) -> None:
    """Add the flag of commands that write a generated model."""
    parser.add_argument(
        "--generate",
        choices=GENERATED,
        help="write a model with random weights first, unless the folder --model has one (default: "
        "a folder in the user's cache)",
    )


def model_folder(name: str) -> Path:
    """Return the default folder of a generated model, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "epd" / "models" / name


def write_model(name: str, folder: Path) -> None:
    """Write a generated model, unless the folder has one.

    Another process writes it, which gives back the device's memory when it ends.

    Raises:
        OSError: the folder cannot be made.
        subprocess.CalledProcessError: it failed, and has printed the reason.
    """
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "epd.tools.models", name, str(folder)]
        with subprocess.Popen(words, stdout=sys.stderr) as writer:
            try:
                status = writer.wait()
            finally:
                writer.terminate()  # it deletes what it has written
        if status != 0:
            raise subprocess.CalledProcessError(status, words)
