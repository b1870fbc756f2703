"""Loading of the configuration from flags, the environment, a file and defaults, in this order.

Values in the YAML file are taken as text, like those of the environment: `no`, `1e3` and `0x10`
have the same meaning in both, independent of the version of YAML.

The configuration in force can be written as YAML, without secrets.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
import yaml
from pydantic import ValidationError
from yaml.constructor import ConstructorError

from ec_store.config import redacted
from epd.config.fields import flag_of
from epd.config.flags import FIELDS, GROUPS, PREFIX, SECRETS, name_of, variables_of
from epd.config.proxy_config import ConfigInvalid, ProxyConfig
from epd.parser import unknown_message

OTHERS = ("EPD_UP_", "EPD_BENCH_", "EPD_PYTHON")
"""Prefixes of variables that configure other commands."""
SERVICE_LINK = re.compile(
    r"EPD_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets in every pod for each Service with a name that begins with `epd`.
"""
LINK = re.compile(r"(tcp|udp|sctp)://")
"""Prefix of the value of `EPD_PORT` if Kubernetes has set it for a Service named `epd`."""

Source = Literal["flag", "environment", "file"]


@dataclass(frozen=True, slots=True)
class Given:
    """Value that an operator has set.

    Attributes:
        value: value as it was written.
        source: kind of the source.
        where: place in the source: `--port`, `EPD_PORT`, `epd.yaml:3`.
        label: prefix of messages about the value.
    """

    value: Any
    source: Source
    where: str
    label: str


def from_environment() -> dict[str, Given]:
    """Return the settings of the environment, by the names of `FIELDS`."""
    values = {variable.upper(): value for variable, value in os.environ.items()}
    found = {}
    for name in FIELDS:
        for variable in variables_of(name):
            value = values.get(variable)
            if value is not None and not _is_service_link(variable, value):
                found[name] = Given(value, "environment", variable, variable)
                break
    return found


def unknown_variables() -> Iterator[str]:
    """Yield a message for each variable that has the prefix of settings and is unknown."""
    known = [variable for name in FIELDS for variable in variables_of(name)]
    for name, value in os.environ.items():
        variable = name.upper()
        if not variable.startswith(PREFIX) or variable.startswith(OTHERS) or variable in known:
            continue
        if not _is_service_link(variable, value):
            yield unknown_message(variable, known)


def _is_service_link(variable: str, value: str) -> bool:
    linked = variable.endswith("_PORT") and LINK.match(value) is not None
    return linked or SERVICE_LINK.fullmatch(variable) is not None


MAX_BYTES = 1024**2
STANDARD = "tag:yaml.org,2002:"
NULL = STANDARD + "null"
PLAIN = {f"{STANDARD}{kind}" for kind in ("str", "int", "float", "bool", "timestamp", "null")}
OCTAL = re.compile(r"[-+]?0[0-9_]+")
"""Number with a leading 0: octal in YAML 1.1, decimal in YAML 1.2."""


def read_yaml(path: Path, names: Collection[str], reasons: list[str]) -> dict[str, Given]:
    """Return the settings of a file. A key without a value sets nothing.

    `names` are those that the file may have; `reasons` gets an error message for each invalid line.

    Raises:
        ConfigInvalid: the file cannot be read, or is not YAML.
    """
    root = _parsed(path)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigInvalid([f"{path}:{_line(root)}: must be lines of `name: value`"])
    lines: dict[str, int] = {}
    found: dict[str, Given] = {}
    for key, node in root.value:
        try:
            name = _name(key, names, lines)
            value = _value(name, node)
        except ConstructorError as error:
            reasons.append(_reason(path, error))
            continue
        if value is not None:
            where = f"{path}:{_line(key)}"
            found[name] = Given(value, "file", where, f"{where}: {name}")
    return found


def _parsed(path: Path) -> yaml.Node | None:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigInvalid([f"--config {path}: {error.strerror}"]) from None
    if len(text) > MAX_BYTES:
        raise ConfigInvalid([f"--config {path}: is larger than {MAX_BYTES} bytes"])
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise ConfigInvalid([_reason(path, error)]) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigInvalid([f"{path}: {type(error).__name__}: is not YAML"]) from None
    return node


def _reason(path: Path, error: yaml.MarkedYAMLError) -> str:
    line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
    return f"{path}{line}: {error.problem}"


def _name(key: yaml.Node, names: Collection[str], lines: dict[str, int]) -> str:
    """Return the name of a setting, and enter its line in `lines`."""
    if not isinstance(key, yaml.ScalarNode):
        raise _invalid(key, "the name of a setting must be a word")
    name = str(key.value)
    if name in SECRETS:
        raise _invalid(
            key,
            f"{name} is a secret and not allowed in this file: set {variables_of(name)[0]}, or "
            f"{name}_file",
        )
    if name not in names:
        raise _invalid(key, unknown_message(name, names))
    if name in lines:
        raise _invalid(key, f"{name} is already set in line {lines[name]}")
    lines[name] = _line(key)
    return name


def _value(name: str, node: yaml.Node) -> str | tuple[str, ...] | None:
    """Return the value as text, or as a tuple of texts; None if there is no value."""
    if isinstance(node, yaml.SequenceNode):
        return tuple(_text(f"an item of {name}", element) or "" for element in node.value)
    return _text(name, node)


def _text(name: str, node: yaml.Node) -> str | None:
    if not isinstance(node, yaml.ScalarNode):
        more = "" if " " in name else ", or a list of values"
        raise _invalid(node, f"{name} must be a value{more}")
    if node.tag not in PLAIN:
        raise _invalid(node, f"{name} has the tag {node.tag}, which is not supported: remove it")
    if node.style is None and OCTAL.fullmatch(node.value):
        raise _invalid(
            node, f"{name} begins with a 0, which YAML reads as an octal number: remove the 0"
        )
    return None if node.tag == NULL else str(node.value)


def _invalid(node: yaml.Node, problem: str) -> ConstructorError:
    return ConstructorError(problem=problem, problem_mark=node.start_mark)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


MAX_SECRET_BYTES = 64 * 1024
NO_TEXT = re.compile(r"[\ud800-\udfff]")
"""Characters that Python decodes from invalid UTF-8 in flags and in the environment."""

Layer = Mapping[str, Given]
"""Settings of one source, by the names of `FIELDS`."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Configuration, with the sources of its values.

    Attributes:
        config: complete configuration.
        given: settings with a given value, by the names of `FIELDS`; the others have defaults.
        unknown: messages about unknown variables that have the prefix of settings. They are not
            errors: the environment may have the variables of other programs.
    """

    config: ProxyConfig
    given: Layer
    unknown: tuple[str, ...] = ()


def load(flags: Mapping[str, Any]) -> Loaded:
    """Return the configuration from these flags, the current environment and the current file.

    Args:
        flags: given flags, by the names of `FIELDS`.

    Raises:
        ConfigInvalid: settings are invalid; the error lists all of them.
    """
    reasons: list[str] = []
    layers: list[Layer] = [
        {name: Given(value, "flag", flag_of(name), flag_of(name)) for name, value in flags.items()},
        from_environment(),
    ]
    layers.append(_file(layers, reasons))
    given = _texts(_first(layers, reasons), reasons)
    values = {
        name: setting.value for name, setting in given.items() if name in ProxyConfig.model_fields
    }
    values |= _secrets(given, reasons)
    try:
        config = ProxyConfig.model_validate(values)
    except ValidationError as invalid:
        reasons += _error_lines(invalid, given, complete=not reasons)
    if reasons:
        raise ConfigInvalid(reasons)
    return Loaded(config, given, tuple(unknown_variables()))


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


def _first(layers: Sequence[Layer], reasons: list[str]) -> dict[str, Given]:
    """Return each setting from the first source that has it; a secret and its file are one."""
    given: dict[str, Given] = {}
    for layer in reversed(layers):
        for name in SECRETS:
            here = [layer[key] for key in (name, f"{name}_file") if key in layer]
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
    for name, setting in given.items():
        values = setting.value if isinstance(setting.value, tuple | list) else (setting.value,)
        if any(NO_TEXT.search(str(value)) for value in values):
            reasons.append(f"{setting.label} is not UTF-8")
        else:
            texts[name] = setting
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


def _error_lines(invalid: ValidationError, given: Layer, *, complete: bool) -> list[str]:
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
        setting = given.get(name) or given.get(f"{name}_file")
        label = setting.label if setting else name_of(name) if name else ""
        lines += [f"{label} {line}".lstrip() for line in message.splitlines()]
    return lines


def as_yaml(loaded: Loaded) -> str:
    """Return a file for `--config` with the same settings; secrets and passwords are comments."""
    values = loaded.config.model_dump(mode="json")  # secrets as asterisks
    return "\n".join(
        f"# {title}\n{''.join(_lines(section.model_fields, values, loaded.given))}"
        for title, section in GROUPS.items()
    )


def _lines(names: Iterable[str], values: Mapping[str, Any], given: Layer) -> Iterator[str]:
    for name in names:
        setting = given.get(name)
        if name == "config" or (name in SECRETS and setting is None):
            continue
        value = values.get(name, setting and setting.value)
        shown = redacted(value) if isinstance(value, str) and "://" in value else value
        hidden = "# " if name in SECRETS or shown != value else ""
        origin = "default" if setting is None else f"{setting.source} {setting.where}"
        yield f"{hidden}{name}: {orjson.dumps(shown).decode()}  # {origin}\n"
