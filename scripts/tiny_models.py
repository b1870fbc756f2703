"""Write tiny multimodal models with seeded random weights, for tests and demos on a CPU.

    python scripts/tiny_models.py DIR
    python scripts/tiny_models.py DIR tiny-paddleocr-vl tiny-pixtral

makes `DIR/tiny-qwen2.5-vl` (pictures, video) and `DIR/tiny-qwen2-audio`, or the models that are
named. Their answers are random letters, but always the same ones for the same input, and they
depend on each picture, each sound and their order: a stage that loses, swaps or damages an encoder
output changes the answer.

A model that this version of the script and of `scripts/tiny` has already written is left alone.
"""

import argparse
import hashlib
import shutil
import tempfile
from pathlib import Path

from scripts.tiny.families import FAMILIES, build

STAMP = "made_by.sha256"
DEFAULT = ("tiny-qwen2.5-vl", "tiny-qwen2-audio")


def main() -> None:
    """Write the models that the command line names."""
    args = arguments()
    directory: Path = args.directory
    directory.mkdir(parents=True, exist_ok=True)
    stamp = digest()
    for name in args.names:
        if not is_current(directory / name, stamp):
            publish(name, directory / name, stamp)
        print(directory / name)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "names",
        nargs="*",
        type=family,
        default=DEFAULT,
        metavar="NAME",
        help=f"{', '.join(FAMILIES)}; default: {' '.join(DEFAULT)}",
    )
    return parser.parse_args()


def family(name: str) -> str:
    """The name of a family, or argparse's error."""
    if name not in FAMILIES:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(FAMILIES)}")
    return name


def is_current(target: Path, stamp: str) -> bool:
    """Tell whether the model was written with this stamp."""
    file = target / STAMP
    return file.exists() and file.read_text() == stamp


def publish(name: str, target: Path, stamp: str) -> None:
    """Write the model beside its place, then move it there: half a model is never seen."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as folder:
        staging = Path(folder) / target.name
        build(name).write(staging)
        (staging / STAMP).write_text(stamp)
        if target.exists():
            shutil.rmtree(target)
        staging.rename(target)


def digest() -> str:
    """Identify this version of the script and of the families."""
    sources = [Path(__file__), *sorted((Path(__file__).parent / "tiny").rglob("*.py"))]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


if __name__ == "__main__":
    main()
