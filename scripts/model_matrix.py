"""Serve every tiny model by real engines and compare the answers with one engine's.

    python scripts/model_matrix.py                       every model, E+PD
    python scripts/model_matrix.py --topology 1e1p1d     every model, E+P+D over NIXL
    python scripts/model_matrix.py tiny-qwen3-vl …       these models
    python scripts/model_matrix.py --write               only write the document
    python scripts/model_matrix.py --check               fail if it is out of date

Results are kept in docs/models.json, one for each model and topology. The tables in docs/models.md
are made from them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

import msgspec

from scripts.generated import DOCS, ROOT
from scripts.matrix.results import Result
from scripts.matrix.running import run
from scripts.matrix.subjects import E_PD, SUBJECTS, TOPOLOGIES
from scripts.matrix.table import written

DOCUMENT, RESULTS = DOCS / "models.md", DOCS / "models.json"
MODELS = ROOT / ".run" / "models"


def main() -> None:
    """Run the models that the command line names, and write the document."""
    args = arguments()
    subjects = [subject for subject in SUBJECTS if subject.name in (args.models or names())]
    results = read()
    if not (args.write or args.check):
        models = [subject.name for subject in subjects]
        subprocess.run(
            [sys.executable, ROOT / "scripts/tiny_models.py", MODELS, *models], check=True
        )
        for subject in subjects:
            for topology in args.topology or [E_PD]:
                print(f"{subject.name} {topology}", flush=True)
                with tempfile.TemporaryDirectory(prefix="epd-matrix-") as temporary:
                    folder = (args.keep or Path(temporary)) / f"{subject.name}-{topology}"
                    result = run(subject, topology, MODELS, folder, partial(print, flush=True))
                results[result.model, result.topology] = result
                keep(results)
                print(f"  {result.seconds:.0f} s {result.notes}", flush=True)
    old = DOCUMENT.read_text()
    new = written(old, list(results.values()))
    if not args.check:
        DOCUMENT.write_text(new)
    elif new != old:
        sys.exit(f"{DOCUMENT.name}: out of date; run scripts/model_matrix.py --write")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", choices=[*names(), []], metavar="MODEL")
    parser.add_argument("--topology", action="append", choices=TOPOLOGIES, help="default: 1e1pd")
    parser.add_argument("--keep", type=Path, help="folder for logs and encoder outputs")
    parser.add_argument("--write", action="store_true", help="run nothing, write the document")
    parser.add_argument("--check", action="store_true", help="run and write nothing")
    return parser.parse_args()


def names() -> list[str]:
    return [subject.name for subject in SUBJECTS]


def read() -> dict[tuple[str, str], Result]:
    """Return the stored results, by model and topology."""
    results = msgspec.json.decode(RESULTS.read_bytes(), type=list[Result])
    return {(result.model, result.topology): result for result in results}


def keep(results: dict[tuple[str, str], Result]) -> None:
    """Store the results, in the order of the table."""
    order = [(name, topology) for name in names() for topology in TOPOLOGIES]
    rows = [asdict(results[key]) for key in order if key in results]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
