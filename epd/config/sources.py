"""Loading of the configuration from flags, the environment, a file and defaults, in this order."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from epd.config.environment import from_environment, unknown_variables
from epd.config.example_flags import with_urls
from epd.config.given import Given
from epd.config.invalid import ConfigInvalid
from epd.config.model import ProxyConfig
from epd.config.settings import SECRETS, Settings, flag_of, name_of
from epd.config.yaml_file import read_yaml

MAX_SECRET_BYTES = 64 * 1024
NO_TEXT = re.compile(r"[\ud800-\udfff]")
"""Characters that Python decodes from invalid UTF-8 in flags and in the environment."""

Layer = Mapping[str, Given]
"""Settings of one source, by the names of `Settings`."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Configuration, with the sources of its values.

    Attributes:
        config: complete configuration.
        given: settings with a given value, by the names of `Settings`; the others have defaults.
    """

    config: ProxyConfig
    given: Layer


def load(flags: Mapping[str, Any]) -> Loaded:
    """Return the configuration from these flags, the current environment and the current file.

    Args:
        flags: given flags, by the names of `Settings` or of vLLM's example proxies.

    Raises:
        ConfigInvalid: settings are invalid; the error lists all of them.
    """
    reasons = list(unknown_variables())
    flags = with_urls(flags, reasons)
    layers: list[Layer] = [
        {name: Given(value, "flag", flag_of(name), flag_of(name)) for name, value in flags.items()},
        from_environment(),
    ]
    layers.append(_file(layers, reasons))
    given = _texts(_first(layers, reasons), reasons)
    values = {name: one.value for name, one in given.items() if name in ProxyConfig.model_fields}
    values |= _secrets(given, reasons)
    try:
        config = ProxyConfig.model_validate(values)
    except ValidationError as invalid:
        reasons += _wrong(invalid, given, complete=not reasons)
    if reasons:
        raise ConfigInvalid(reasons)
    return Loaded(config, given)


def _file(layers: Iterable[Layer], reasons: list[str]) -> Layer:
    named = next((layer["config"].value for layer in layers if "config" in layer), "")
    if not str(named):
        return {}
    names = [name for name in Settings.model_fields if name != "config"]
    try:
        found, wrong = read_yaml(Path(named), names)
    except ConfigInvalid as invalid:
        found, wrong = {}, list(invalid.reasons)
    reasons += wrong
    return found


def _first(layers: Sequence[Layer], reasons: list[str]) -> dict[str, Given]:
    """Return each setting from the first source that has it; a secret and its file are one."""
    given: dict[str, Given] = {}
    for layer in reversed(layers):
        for name in SECRETS:
            here = [layer[one] for one in (name, f"{name}_file") if one in layer]
            if len(here) > 1:
                reasons.append(f"{here[0].where} and {here[1].where} exclude each other: keep one")
            if here:
                given.pop(name, None)
                given.pop(f"{name}_file", None)
        given |= layer
    return given


def _texts(given: Layer, reasons: list[str]) -> Layer:
    """Return the settings that are valid UTF-8: others cannot be sent to other processes."""
    texts = {}
    for name, one in given.items():
        values = one.value if isinstance(one.value, tuple | list) else (one.value,)
        if any(NO_TEXT.search(str(value)) for value in values):
            reasons.append(f"{one.label} is not UTF-8")
        else:
            texts[name] = one
    return texts


def _secrets(given: Layer, reasons: list[str]) -> dict[str, str]:
    """Return the secrets from their files, without surrounding white space."""
    found = {}
    for name in SECRETS:
        if (file := given.get(f"{name}_file")) is None:
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


def _wrong(invalid: ValidationError, given: Layer, *, complete: bool) -> list[str]:
    """Return a line for each error.

    If a source could not be read, missing and conflicting settings are not reported: the unread
    source may resolve them.
    """
    lines = []
    for error in invalid.errors(include_url=False, include_context=False, include_input=False):
        name = str(error["loc"][0]) if error["loc"] else ""
        message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if not complete and (error["type"] == "missing" or not name):
            continue
        if error["type"] == "missing":
            lines.append(f"{name_of(name)} is required")
            continue
        one = given.get(name) or given.get(f"{name}_file")
        label = one.label if one else name_of(name) if name else ""
        lines += [f"{label} {line}".lstrip() for line in message.splitlines()]
    return lines
