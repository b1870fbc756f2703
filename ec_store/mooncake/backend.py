"""Backend of `mooncake://`, which is only a tier."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from ec_store.backends import Backend
from ec_store.mooncake.url import mooncake_options

if TYPE_CHECKING:
    from ec_store.mooncake.tier import MooncakeTier


def _open(url: str, create: bool, lazy: bool) -> "MooncakeTier":  # noqa: ARG001 - at its first use
    if find_spec("mooncake") is None:
        raise ValueError(
            "a mooncake:// tier needs Mooncake's library in the environment of this server, and of "
            "no engine: pip install 'ec-store[mooncake]'"
        )
    from ec_store.mooncake.tier import MooncakeTier  # noqa: PLC0415

    return MooncakeTier.from_url(url)


BACKEND = Backend(check=mooncake_options, open=_open)
