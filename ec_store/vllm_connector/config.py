"""Options of the connector."""

from collections.abc import Mapping

from pydantic import BaseModel, ByteSize, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from ec_store.engine.fetcher import MEMORY_BYTES
from ec_store.engine.writer import QUEUE_BYTES


class ConnectorConfig(BaseModel):
    """Options of the connector, which the operator writes into `ec_connector_extra_config`.

    Attributes:
        store: URL of the store, as for `ec_store.open_store`.
        generation: part of the namespace. A new number starts with an empty cache.
        timeout_s: seconds after which an entry that has not arrived is a miss.
        promise_timeout_s: the same for an entry that the request's `ec_transfer_params` names.
        memory_bytes: host memory of the scheduler's process for entries that requests need, entries
            kept after them, and entries being fetched.
        fetch_threads: number of entries fetched at once; None for the default of the store.
        queue_bytes: upper bound of the host memory of entries that wait to be written.
        region_bytes: memory that a consumer with several workers shares with them; None for
            `memory_bytes`.
        encoder_output_widths: columns of encoder outputs by modality, needed if neither vLLM nor
            the model's configuration provides them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: str
    generation: NonNegativeInt = 0
    timeout_s: PositiveFloat = 1.0
    promise_timeout_s: PositiveFloat = 5.0
    memory_bytes: ByteSize = ByteSize(MEMORY_BYTES)
    fetch_threads: PositiveInt | None = None
    queue_bytes: ByteSize = ByteSize(QUEUE_BYTES)
    region_bytes: ByteSize | None = None
    encoder_output_widths: Mapping[str, PositiveInt] = {}
