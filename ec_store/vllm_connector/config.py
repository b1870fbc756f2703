"""What an operator writes into `ec_connector_extra_config`."""

from pydantic import BaseModel, ByteSize, ConfigDict, PositiveFloat

from ec_store.writer import QUEUE_BYTES


class ConnectorConfig(BaseModel):
    """The connector's options.

    Attributes:
        store: a URL of `ec_store.open_store`.
        namespace: stands for the model's name and revision in the namespace, where one model is
            served from different paths.
        timeout_s: an entry that does not come by then is a miss.
        promise_timeout_s: the same for one that the request's `ec_transfer_params` names.
        keep_bytes: host memory for entries that no request needs.
        queue_bytes: how much may wait to be written, on the device.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: str
    namespace: str | None = None
    timeout_s: PositiveFloat = 1.0
    promise_timeout_s: PositiveFloat = 5.0
    keep_bytes: ByteSize = ByteSize(256 * 1024**2)
    queue_bytes: ByteSize = ByteSize(QUEUE_BYTES)
