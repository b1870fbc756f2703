"""Write the tables of `epd.request.recovery` and `encode_retries` into their document.

python scripts/recovery_table.py          writes both tables
python scripts/recovery_table.py --check  fails if a table is out of date
"""

import re
from collections.abc import Sequence

from epd.request.encode_retries import ENCODE_RULES, EncodeRule
from epd.request.recovery import RULES, Rule
from scripts.generated import DOCS, write_or_check

DOCUMENT = DOCS / "decisions/011-trying-again.md"
TABLES: dict[str, Sequence[Rule | EncodeRule]] = {"request": RULES, "item": ENCODE_RULES}
PLACE = re.compile(r"(<!-- recovery of (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Write both tables, or check them with `--check`."""
    write_or_check(
        __doc__,
        [(DOCUMENT, lambda old: PLACE.sub(lambda of: of[1] + table(TABLES[of[2]]) + of[4], old))],
    )


def table(rules: Sequence[Rule | EncodeRule]) -> str:
    """Return the rows of a table in Markdown, numbered in their order."""
    rows = [
        f"| {number} | {rule.condition} | {rule.follows} |" for number, rule in enumerate(rules, 1)
    ]
    return "\n".join(["| # | condition | next attempt |", "| --- | --- | --- |", *rows, ""])


if __name__ == "__main__":
    main()
