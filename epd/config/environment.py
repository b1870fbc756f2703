"""Settings from the environment."""

import os
import re
from collections.abc import Iterator

from pydantic_settings import EnvSettingsSource

from epd.config.given import Given
from epd.config.invalid import unknown
from epd.config.settings import PREFIX, Settings, variables_of

OTHERS = ("EPD_UP_", "EPD_BENCH_", "EPD_PYTHON")
"""Prefixes of variables that configure other commands."""
SERVICE_LINK = re.compile(
    r"EPD_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets in every pod for each Service with a name that begins with `epd`.
"""
LINK = re.compile(r"(tcp|udp|sctp)://")
"""Prefix of the value of `EPD_PORT` if Kubernetes has set it for a Service named `epd`."""


def from_environment() -> dict[str, Given]:
    """Return the settings of the environment, by the names of `Settings`."""
    present = {variable.upper() for variable in os.environ}
    names = {variables_of(name)[0]: name for name in Settings.model_fields}
    found = {}
    for alias, value in EnvSettingsSource(Settings)().items():
        name = names.get(alias, alias)
        variable = next(one for one in variables_of(name) if one in present)
        if not _is_service_link(variable, value):
            found[name] = Given(value, "environment", variable, variable)
    return found


def unknown_variables() -> Iterator[str]:
    """Yield an error message for each variable that has the prefix of settings and is unknown."""
    known = [variable for name in Settings.model_fields for variable in variables_of(name)]
    for name, value in os.environ.items():
        variable = name.upper()
        if not variable.startswith(PREFIX) or variable.startswith(OTHERS) or variable in known:
            continue
        if not _is_service_link(variable, value):
            yield unknown(variable, known)


def _is_service_link(variable: str, value: str) -> bool:
    linked = variable.endswith("_PORT") and LINK.match(value) is not None
    return linked or SERVICE_LINK.fullmatch(variable) is not None
