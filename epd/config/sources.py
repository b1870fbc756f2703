"""Settings as an operator wrote them, each with its source; those of the environment."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from epd.config.flags import FIELDS, PREFIX, variables_of
from epd.parser import unknown_message

OTHERS = ("EPD_UP_", "EPD_BENCH_", "EPD_PYTHON")
"""Prefixes of variables that configure other commands."""

SERVICE_LINK = re.compile(
    r"EPD_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets in every pod for each Service with a name that begins with `epd`.
"""

SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
"""Prefix of the value of `EPD_PORT` if Kubernetes has set it for a Service named `epd`."""

Source = Literal["flag", "environment", "file", "proxy"]


@dataclass(frozen=True, slots=True)
class Setting:
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


def from_environment() -> dict[str, Setting]:
    """Return the settings of the environment, by the names of `FIELDS`."""
    values = {variable.upper(): value for variable, value in os.environ.items()}
    found = {}
    for name in FIELDS:
        for variable in variables_of(name):
            value = values.get(variable)
            if value is not None and not _is_service_link(variable, value):
                found[name] = Setting(value, "environment", variable, variable)
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
    linked = variable.endswith("_PORT") and SERVICE_ADDRESS.match(value) is not None
    return linked or SERVICE_LINK.fullmatch(variable) is not None
