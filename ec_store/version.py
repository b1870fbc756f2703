"""Version of both distributions, `ec-store` and `epd-proxy`; their builds read it too."""

__version__ = "0.2.0"
