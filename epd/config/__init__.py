"""Settings: their fields, their sources, and the configuration in force."""

from epd.config.live import ConfigInvalid
from epd.config.proxy_config import ProxyConfig

__all__ = ["ConfigInvalid", "ProxyConfig"]
