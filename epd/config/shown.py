"""Settings as operators see them: as a file for `--config`, and as JSON of a running proxy.

Both have no secrets.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson
from typing_extensions import TypedDict

from ec_store.config import redacted
from epd.config.flags import GROUPS, SECRETS
from epd.config.load import Layer, Loaded
from epd.config.proxy_config import ProxyConfig

REDACTED = "//:***@"
"""Text in place of the user and the password of a URL, which stays a valid one."""


class PublicSettings(TypedDict):
    """Settings of a proxy without secrets, which are the answer to `GET /settings`."""

    version: str
    """Version of the proxy."""
    settings: dict[str, Any]
    """Settings that the operator has set, by their names in a file for `--config`; without secrets,
    and without passwords in URLs. The others have their defaults."""
    hidden: list[str]
    """Names of the settings with a secret or a password."""
    instances: list[dict[str, Any]]
    """Instances of all sources but DNS, as in a file of instances."""


def as_yaml(loaded: Loaded) -> str:
    """Return a file for `--config` with the same settings; secrets and passwords are comments."""
    values = loaded.config.model_dump(mode="json")  # secrets as asterisks
    return "\n".join(
        f"# {title}\n{''.join(_lines(section.model_fields, values, loaded.settings))}"
        for title, section in GROUPS.items()
    )


def _lines(names: Iterable[str], values: Mapping[str, Any], settings: Layer) -> Iterator[str]:
    for name in names:
        setting = settings.get(name)
        if name == "config" or (name in SECRETS and setting is None):
            continue
        value = values.get(name, setting and setting.value)
        shown = _shown(value)
        hidden = "# " if name in SECRETS or REDACTED in str(shown) else ""
        origin = "default" if setting is None else f"{setting.source} {setting.where}"
        yield f"{hidden}{name}: {orjson.dumps(shown).decode()}  # {origin}\n"


def public_settings(config: ProxyConfig) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that the operator has set, without secrets, and the names of hidden ones.

    A URL with a password is in both.
    """
    values = config.model_dump(mode="json", include=config.model_fields_set)
    hidden = [name for name in values if name in SECRETS and values[name] is not None]
    shown = {name: _shown(value) for name, value in values.items() if name not in SECRETS}
    return shown, hidden + [name for name, value in shown.items() if REDACTED in str(value)]


def _shown(value: Any) -> Any:
    if not (isinstance(value, str) and "://" in value):
        return value
    return redacted(value).replace(redacted("//@"), REDACTED)
