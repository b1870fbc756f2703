"""Reading of settings from a YAML file.

Values are taken as text, like those of the environment: `no`, `1e3` and `0x10` have the same
meaning in both, independent of the version of YAML.
"""

import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

from epd.config.given import Given
from epd.config.invalid import ConfigInvalid, unknown
from epd.config.settings import SECRETS, variables_of

MAX_BYTES = 1024**2
STANDARD = "tag:yaml.org,2002:"
NULL = STANDARD + "null"
PLAIN = {f"{STANDARD}{kind}" for kind in ("str", "int", "float", "bool", "timestamp", "null")}
OCTAL = re.compile(r"[-+]?0[0-9_]+")
"""Number with a leading 0: octal in YAML 1.1, decimal in YAML 1.2."""

Say = Callable[[yaml.Node, str], None]
"""Function called with a node and its error message."""


def read_yaml(path: Path, names: Collection[str]) -> tuple[dict[str, Given], list[str]]:
    """Return the settings of a file, and the error messages for its invalid lines.

    A key without a value sets nothing.

    Args:
        path: path of the file.
        names: names of the settings that the file may have.

    Raises:
        ConfigInvalid: the file cannot be read, or is not YAML.
    """
    root, reasons = _parsed(path), list[str]()
    if root is None:
        return {}, reasons
    if not isinstance(root, yaml.MappingNode):
        raise ConfigInvalid([f"{path}:{_line(root)}: must be lines of `name: value`"])

    def say(node: yaml.Node, reason: str) -> None:
        reasons.append(f"{path}:{_line(node)}: {reason}")

    found: dict[str, Given] = {}
    for key, node in _entries(root, names, say):
        value = _value(key.value, node, say)
        if value is not None:
            where = f"{path}:{_line(key)}"
            found[key.value] = Given(value, "file", where, f"{where}: {key.value}")
    return found, reasons


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
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigInvalid([f"{path}{line}: {error.problem}"]) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigInvalid([f"{path}: {type(error).__name__}: is not YAML"]) from None
    return node


def _entries(
    root: yaml.MappingNode, names: Collection[str], say: Say
) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """Yield each valid key once, with its value."""
    lines: dict[str, int] = {}
    for key, node in root.value:
        if not isinstance(key, yaml.ScalarNode):
            say(key, "the name of a setting must be a word")
        elif key.value in SECRETS:
            say(
                key,
                f"{key.value} is a secret and not allowed in this file: set "
                f"{variables_of(key.value)[0]}, or {key.value}_file",
            )
        elif key.value not in names:
            say(key, unknown(key.value, names))
        elif key.value in lines:
            say(key, f"{key.value} is already set in line {lines[key.value]}")
        else:
            lines[key.value] = _line(key)
            yield key, node


def _value(name: str, node: yaml.Node, say: Say) -> Any:
    """Return the value as text, or as a tuple of texts; None if there is no value."""
    if isinstance(node, yaml.SequenceNode):
        return tuple(_text(f"an item of {name}", one, say) or "" for one in node.value)
    return _text(name, node, say)


def _text(name: str, node: yaml.Node, say: Say) -> str | None:
    if not isinstance(node, yaml.ScalarNode):
        say(node, f"{name} must be a value" + ("" if " " in name else ", or a list of values"))
        return None
    if node.tag not in PLAIN:
        say(node, f"{name} has the tag {node.tag}, which is not supported: remove it")
    if node.style is None and OCTAL.fullmatch(node.value):
        say(node, f"{name} begins with a 0, which YAML reads as an octal number: remove the 0")
    return None if node.tag == NULL else str(node.value)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
