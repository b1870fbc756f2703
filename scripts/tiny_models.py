"""Write tiny multimodal models with seeded random weights, for tests and demos on a CPU.

    python scripts/tiny_models.py DIR
    python scripts/tiny_models.py DIR tiny-paddleocr-vl tiny-pixtral

It writes `DIR/tiny-qwen2.5-vl` (pictures, video) and `DIR/tiny-qwen2-audio`, or the named models.
Their responses are random letters, always the same for the same input. They depend on each picture,
each sound and their order: a stage that loses, swaps or damages an encoder output changes the
response.

A model that the same version of this script and of the generator has written is kept.
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
    args = arguments()
    directory: Path = args.directory
    directory.mkdir(parents=True, exist_ok=True)
    stamp = digest()
    for name in args.names:
        if not is_current(directory / name, stamp):
            publish(name, directory / name, stamp)
        print(directory / name)


def arguments() -> argparse.Namespace:
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
    """Return the name of a family; raise argparse's error if it is unknown."""
    if name not in FAMILIES:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(FAMILIES)}")
    return name


def is_current(target: Path, stamp: str) -> bool:
    file = target / STAMP
    return file.exists() and file.read_text() == stamp


def publish(name: str, target: Path, stamp: str) -> None:
    """Write the model to a temporary folder, then rename it: no reader sees half of a model."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as folder:
        staging = Path(folder) / target.name
        build(name).write(staging)
        (staging / STAMP).write_text(stamp)
        if target.exists():
            shutil.rmtree(target)
        staging.rename(target)


def digest() -> str:
    """Return the SHA-256 of the sources of this script and of the families."""
    scripts = Path(__file__).parent
    folders = scripts / "tiny", scripts.parent / "epd" / "tools" / "models"
    sources = [Path(__file__), *(file for each in folders for file in sorted(each.rglob("*.py")))]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


if __name__ == "__main__":
    main()
