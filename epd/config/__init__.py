"""Settings: what there is to set, where each is set, and what is in force."""

from epd.config.invalid import ConfigInvalid
from epd.config.model import ProxyConfig

__all__ = ["ConfigInvalid", "ProxyConfig"]
