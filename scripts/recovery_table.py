"""Write the tables of `epd.request.recovery` and `encode_retries` into their document.

python scripts/recovery_table.py          writes both tables
python scripts/recovery_table.py --check  fails if a table is out of date
"""

from collections.abc import Sequence

from epd.request.encode_retries import ENCODE_RULES, EncodeRule
from epd.request.recovery import RULES, Rule
from scripts.generated import DOCS, write_or_check

TABLES: dict[str, Sequence[Rule | EncodeRule]] = {
    "recovery of request": RULES,
    "recovery of item": ENCODE_RULES,
}


def table(name: str, _: str) -> str:
    """Return the rows of a table in Markdown, numbered in their order."""
    rows = [
        f"| {number} | {rule.condition} | {rule.follows} |"
        for number, rule in enumerate(TABLES[name], 1)
    ]
    return "\n".join(["| # | condition | next attempt |", "| --- | --- | --- |", *rows, ""])


if __name__ == "__main__":
    write_or_check(__doc__, [DOCS / "decisions/011-trying-again.md"], table)
