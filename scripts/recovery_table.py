"""Write the recovery tables of `epd.request.recovery` into docs/decisions/011-trying-again.md.

python scripts/recovery_table.py          writes both tables
python scripts/recovery_table.py --check  fails if a table is out of date
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epd.request.recovery import ENCODE_RULES, RULES, Rule

DOCUMENT = Path(__file__).resolve().parents[1] / "docs/decisions/011-trying-again.md"
TABLES: dict[str, Sequence[Rule[Any, Any]]] = {"request": RULES, "item": ENCODE_RULES}
PLACE = re.compile(r"(<!-- recovery of (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Write the tables, or check them with `--check`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="fail if a table is out of date; write nothing"
    )
    check = parser.parse_args().check
    old = DOCUMENT.read_text()
    new = PLACE.sub(lambda found: found[1] + table(TABLES[found[2]]) + found[4], old)
    if not check:
        DOCUMENT.write_text(new)
    elif new != old:
        sys.exit(f"{DOCUMENT.name}: out of date; run scripts/recovery_table.py")


def table(rules: Sequence[Rule[Any, Any]]) -> str:
    """Return the rows of a table in Markdown, numbered in their order."""
    rows = [
        f"| {number} | {rule.condition} | {rule.follows} |" for number, rule in enumerate(rules, 1)
    ]
    return "\n".join(["| # | condition | next attempt |", "| --- | --- | --- |", *rows, ""])


if __name__ == "__main__":
    main()
