"""Settings in a YAML file.

Values are taken as text, like those of the environment: `no`, `1e3` and `0x10` have the same
meaning in both, independent of the version of YAML.
"""

import re
from collections.abc import Collection
from pathlib import Path

import yaml
from yaml.constructor import ConstructorError

from epd.config.flags import SECRETS, variables_of
from epd.config.proxy_config import ConfigInvalid
from epd.config.sources import Setting
from epd.parser import unknown_message

MAX_BYTES = 1024**2

STANDARD = "tag:yaml.org,2002:"

NULL = STANDARD + "null"

PLAIN = {f"{STANDARD}{kind}" for kind in ("str", "int", "float", "bool", "timestamp", "null")}

OCTAL = re.compile(r"[-+]?0[0-9_]+")
"""Number with a leading 0: octal in YAML 1.1, decimal in YAML 1.2."""


def read_yaml(path: Path, names: Collection[str], reasons: list[str]) -> dict[str, Setting]:
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
    found: dict[str, Setting] = {}
    for key, node in root.value:
        try:
            name = _name(key, names, lines)
            value = _value(name, node)
        except ConstructorError as error:
            reasons.append(_reason(path, error))
            continue
        if value is not None:
            where = f"{path}:{_line(key)}"
            found[name] = Setting(value, "file", where, f"{where}: {name}")
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
