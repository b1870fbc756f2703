"""Output of the configuration in force, as YAML or JSON and without secrets."""

from collections.abc import Iterator
from typing import Any

import orjson
from pydantic import SecretStr

from ec_store import redacted
from epd.config.groups import group_of
from epd.config.settings import SECRETS, Settings
from epd.config.sources import Loaded

HIDDEN = "**********"


def as_yaml(loaded: Loaded) -> str:
    """Return a file for `--config` with the same settings; secrets and passwords are comments."""
    lines, groups = list[str](), dict[str, list[str]]()
    for name, shown in _settings(loaded):
        hidden = "# " if shown["hidden"] else ""
        line = f"{hidden}{name}: {orjson.dumps(shown['value']).decode()}  # {_origin(shown)}"
        groups.setdefault(group_of(name), []).append(line)
    for title, settings in groups.items():
        lines += [f"# {title}", *settings, ""]
    return "\n".join(lines)


def as_json(loaded: Loaded) -> str:
    """Return the settings as JSON: `{name: {"value": …, "from": …, "where": …}}`."""
    shown = {
        name: {key: value for key, value in one.items() if key != "hidden"}
        for name, one in _settings(loaded)
    }
    return orjson.dumps(shown, option=orjson.OPT_INDENT_2, default=str).decode()


def _settings(loaded: Loaded) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in Settings.model_fields:
        given = loaded.given.get(name)
        if name == "config" or (name in SECRETS and given is None):
            continue
        value = getattr(loaded.config, name, given and given.value)
        shown = _shown(value)
        yield (
            name,
            {
                "value": shown,
                "hidden": name in SECRETS or (isinstance(value, str) and shown != value),
                "from": "default" if given is None else given.source,
                "where": None if given is None else given.where,
            },
        )


def _shown(value: Any) -> Any:
    match value:
        case SecretStr():
            return HIDDEN
        case str() if "://" in value:
            return redacted(value)
        case None | bool() | int() | float() | str() | tuple():
            return value
        case _:
            return str(value)


def _origin(shown: dict[str, Any]) -> str:
    return "default" if shown["from"] == "default" else f"{shown['from']} {shown['where']}"
