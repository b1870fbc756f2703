"""Settings: their fields, their sources, and the configuration in force."""

from epd.config.proxy_config import ConfigInvalid, ProxyConfig

__all__ = ["ConfigInvalid", "ProxyConfig"]
