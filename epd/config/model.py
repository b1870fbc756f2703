"""Model of all settings."""

from typing import Self

import orjson
from pydantic import SecretStr, model_validator

from epd.config.parts.cross_origin import CrossOriginSettings
from epd.config.parts.limits import LimitSettings
from epd.config.parts.media import MediaSettings
from epd.config.parts.routes import RouteSettings
from epd.config.parts.serving import ServingSettings
from epd.config.parts.tenancy import TenancySettings


class ProxyConfig(
    RouteSettings,
    TenancySettings,
    MediaSettings,
    LimitSettings,
    CrossOriginSettings,
    ServingSettings,
):
    """Configuration of the proxy: the settings that `create_app` takes.

    Each field is a flag of `epd serve` and an environment variable `EPD_<FIELD>`. Its description
    is the flag's help.
    """

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if self.dynamic_registration and self.admin_api_key is None:
            raise ValueError(
                "--dynamic-registration needs EPD_ADMIN_API_KEY or ADMIN_API_KEY: a registered "
                "instance gets clients' requests"
            )
        return self

    def to_json(self) -> bytes:
        """Return all settings as JSON, secrets in plain text: for worker processes only."""
        values = {
            name: value.get_secret_value() if isinstance(value, SecretStr) else value
            for name, value in self
        }
        return orjson.dumps(values, default=str)
