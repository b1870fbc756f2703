"""Settings: a class for each topic, and all of them in one flat model.

The docstring of a field is its description: the help of its flag, and its row in the documents.
Pydantic reads it from the source file, without which `--help` has no texts.
The model has no checks that need other components; these are in `epd.config.proxy_config`.
"""

from epd.config.sections.instances import InstanceSettings
from epd.config.sections.limits import LimitSettings, MediaSettings
from epd.config.sections.routing import RouteSettings
from epd.config.sections.serving import CrossOriginSettings, ServingSettings, TenancySettings
from epd.config.sections.transfers import TransferSettings


class ConfigFields(
    RouteSettings,
    TransferSettings,
    InstanceSettings,
    TenancySettings,
    MediaSettings,
    LimitSettings,
    CrossOriginSettings,
    ServingSettings,
):
    """The fields of all sections.

    A component names the section that it depends on, and is given this model. The components that
    a field names (transfers, policies, the store) check it in `ProxyConfig`, so that sections need
    none of them.
    """

    @property
    def worker_max_body_bytes(self) -> int:
        """Maximum size of a body in one process; also the limit of the media of one request."""
        return min(self.max_body_bytes, max(1, self.max_inflight_bytes // self.workers))
