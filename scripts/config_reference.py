"""Write the tables of settings in docs/configuration/settings.md, from the settings' fields.

    python scripts/config_reference.py          writes the tables
    python scripts/config_reference.py --check  fails if the tables are out of date

A table of the settings that most operators need is in docs/configuration.md.
"""

from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from epd.config.flags import FIELDS, GROUPS, SECRETS, metavar_of, shown_default, variables_of
from epd.parser import flag_of
from scripts.generated import DOCS, write_or_check

FIRST = (
    "encode_servers_urls",
    "prefill_servers_urls",
    "decode_servers_urls",
    "ec_store",
    "kv_transfer",
    "port",
    "workers",
    "max_requests",
    "api_keys_file",
    "admin_api_key",
)
"""Settings that most operators need, in the order in which they need them."""

FIRST_HEADER = "| setting | default | |\n| --- | --- | --- |\n"
HEADER = "| flag | value | default | |\n|" + " --- |" * 4 + "\n"
TYPES = {"N": "number", "BYTES": "bytes", "SECONDS": "seconds", "URLS": "URLs", "URL": "URL"}
BINARY = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))
NONE = "-"


def tables(name: str, _: str) -> str:
    if name == "first settings":
        return f"\n{FIRST_HEADER}{''.join(map(first_row, FIRST))}\n"
    return "\n{}\n".format("\n".join(map(table, GROUPS)))


def table(title: str) -> str:
    """Return the table of one group, with its heading."""
    lines = (row(name, field) for name, field in GROUPS[title].model_fields.items())
    return f"## Settings: {title}\n\n{HEADER}{''.join(lines)}"


def first_row(name: str) -> str:
    """Return the row of one setting in the table of those that most operators need."""
    field = FIELDS[name]
    name_shown = code(variables_of(name)[0] if name in SECRETS else flag_of(name))
    return f"| {name_shown} | {default(name, field)} | {description(field)} |\n"


def row(name: str, field: FieldInfo) -> str:
    cells = (
        ", ".join(map(code, variables_of(name))) if name in SECRETS else code(flag_of(name)),
        value(name, field),
        default(name, field),
        description(field),
    )
    return f"| {' | '.join(cells)} |\n"


def description(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


def value(name: str, field: FieldInfo) -> str:
    if name in SECRETS:
        return "secret"
    if field.annotation is bool:
        return "`true`, `false`"
    if get_origin(field.annotation) is Literal:
        return ", ".join(map(code, get_args(field.annotation)))
    metavar = metavar_of(name)
    return TYPES.get(metavar, metavar.lower())


def default(name: str, field: FieldInfo) -> str:
    """Return the default of a setting, with its binary unit if it is a size."""
    if field.is_required():
        return "required"
    if field.default in {None, ()}:
        return NONE
    shown = str(field.default).lower() if field.annotation is bool else shown_default(field)
    for unit, size in BINARY if name.endswith("_bytes") else ():
        if field.default >= size and not field.default % size:
            return f"{code(shown)} ({field.default // size} {unit})"
    return code(shown)


def code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    documents = [DOCS / "configuration/settings.md", DOCS / "configuration.md"]
    write_or_check(__doc__, documents, tables)
