"""Loading of the configuration from flags, the environment, a file and defaults, in this order.

For a running proxy, its own settings take the place of the file.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from epd.config.flags import FIELDS, SECRETS, name_of
from epd.config.proxy_config import ConfigInvalid, ProxyConfig
from epd.config.sources import Setting, from_environment, unknown_variables
from epd.config.yaml_file import read_yaml
from epd.parser import flag_of

MAX_SECRET_BYTES = 64 * 1024
NO_TEXT = re.compile(r"[\ud800-\udfff]")
"""Characters that Python decodes from invalid UTF-8 in flags and in the environment."""

HIDDEN = 16 * "*"
"""Value of a secret that a running proxy does not show."""

Layer = Mapping[str, Setting]
"""Settings of one source, by the names of `FIELDS`."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Configuration, with the sources of its values.

    Attributes:
        config: complete configuration.
        settings: settings that the operator has set, by the names of `FIELDS`; the others have
            defaults.
        unknown: messages about unknown variables that have the prefix of settings. They are not
            errors: the environment may have the variables of other programs.
    """

    config: ProxyConfig
    settings: Layer
    unknown: tuple[str, ...] = ()


def load(flags: Mapping[str, Any]) -> Loaded:
    """Return the configuration from these flags, the current environment and the current file.

    Args:
        flags: given flags, by the names of `FIELDS`.

    Raises:
        ConfigInvalid: settings are invalid; the error lists all of them.
    """
    reasons: list[str] = []
    layers = [_flags(flags), from_environment()]
    layers.append(_file(layers, reasons))
    return Loaded(*_config(layers, reasons), tuple(unknown_variables()))


def load_running(
    flags: Mapping[str, Any], url: str, shown: Mapping[str, Any], hidden: Collection[str]
) -> Loaded:
    """Return the configuration of a running proxy, with these flags in place of its own.

    Hidden settings come from the environment too; without a variable, a secret is asterisks.

    Args:
        flags: given flags, by the names of `FIELDS`.
        url: URL of the proxy.
        shown: its settings, as `public_settings` returns them.
        hidden: names of those with a secret or a password.

    Raises:
        ConfigInvalid: settings are invalid here; the error lists all of them.
    """
    values = {**shown, **{name: HIDDEN for name in hidden if name in SECRETS}}
    proxy = {name: Setting(value, "proxy", url, flag_of(name)) for name, value in values.items()}
    own = {
        name: setting
        for name, setting in from_environment().items()
        if name.removesuffix("_file") in hidden
    }
    return Loaded(*_config([_flags(flags), own, proxy], []))


def _flags(flags: Mapping[str, Any]) -> Layer:
    return {
        name: Setting(value, "flag", flag_of(name), flag_of(name)) for name, value in flags.items()
    }


def _config(layers: Sequence[Layer], reasons: list[str]) -> tuple[ProxyConfig, Layer]:
    settings = _texts(_first(layers, reasons), reasons)
    values = {
        name: setting.value
        for name, setting in settings.items()
        if name in ProxyConfig.model_fields
    }
    values |= _secrets(settings, reasons)
    try:
        config = ProxyConfig.model_validate(values)
    except ValidationError as invalid:
        reasons += _error_lines(invalid, settings, complete=not reasons)
    if reasons:
        raise ConfigInvalid(reasons)
    return config, settings


def _file(layers: Iterable[Layer], reasons: list[str]) -> Layer:
    named = next((layer["config"].value for layer in layers if "config" in layer), "")
    if not str(named):
        return {}
    names = [name for name in FIELDS if name != "config"]
    try:
        return read_yaml(Path(named), names, reasons)
    except ConfigInvalid as invalid:
        reasons += invalid.reasons
        return {}


def _first(layers: Sequence[Layer], reasons: list[str]) -> dict[str, Setting]:
    """Return each setting from the first source that has it; a secret and its file are one."""
    settings: dict[str, Setting] = {}
    for layer in reversed(layers):
        for name in SECRETS:
            here = [layer[key] for key in (name, f"{name}_file") if key in layer]
            if len(here) > 1:
                reasons.append(f"{here[0].where} and {here[1].where} exclude each other: keep one")
            if here:
                settings.pop(name, None)
                settings.pop(f"{name}_file", None)
        settings |= layer
    return settings


def _texts(settings: Layer, reasons: list[str]) -> Layer:
    """Return the settings that are valid UTF-8: others cannot be sent to other processes."""
    texts = {}
    for name, setting in settings.items():
        values = setting.value if isinstance(setting.value, tuple | list) else (setting.value,)
        if any(NO_TEXT.search(str(value)) for value in values):
            reasons.append(f"{setting.label} is not UTF-8")
        else:
            texts[name] = setting
    return texts


def _secrets(settings: Layer, reasons: list[str]) -> dict[str, str]:
    found = {}
    for name in SECRETS:
        if (file := settings.get(f"{name}_file")) is None:
            continue
        try:
            with Path(file.value).open("rb") as opened:
                text = opened.read(MAX_SECRET_BYTES).decode().strip()
        except OSError as error:
            reasons.append(f"{file.label} {file.value}: {error.strerror}")
        except UnicodeDecodeError:
            reasons.append(f"{file.label} {file.value}: is not UTF-8 text")
        else:
            if text:
                found[name] = text
            else:
                reasons.append(f"{file.label} {file.value}: is empty")
    return found


def _error_lines(invalid: ValidationError, settings: Layer, *, complete: bool) -> list[str]:
    """Return a line for each error.

    If a source could not be read, conflicting settings are not reported: the unread source may
    resolve them.
    """
    lines = []
    for error in invalid.errors(include_url=False, include_context=False, include_input=False):
        name = str(error["loc"][0]) if error["loc"] else ""
        message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
        message = message.partition(", unable to parse")[0]
        if not complete and not name:
            continue
        setting = settings.get(name) or settings.get(f"{name}_file")
        label = setting.label if setting else name_of(name) if name else ""
        lines += [f"{label} {line}".lstrip() for line in message.splitlines()]
    return lines
