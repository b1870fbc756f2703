"""What an operator writes into `ec_connector_extra_config`."""

from collections.abc import Mapping

from pydantic import BaseModel, ByteSize, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from ec_store.fetcher import MEMORY_BYTES
from ec_store.writer import QUEUE_BYTES


class ConnectorConfig(BaseModel):
    """The connector's options.

    Attributes:
        store: a URL of `ec_store.open_store`.
        generation: part of the namespace. Another number starts with an empty cache.
        timeout_s: an entry that does not come by then is a miss.
        promise_timeout_s: the same for one that the request's `ec_transfer_params` names.
        memory_bytes: host memory of the scheduler's process for entries that are held for requests,
            kept after them, and on their way.
        fetch_threads: how many entries are fetched at once; None: as many as suit the store.
        queue_bytes: how much may wait in host memory to be written.
        region_bytes: memory that a consumer with several workers shares with them; None: as much as
            `memory_bytes`.
        encoder_output_widths: columns of encoder outputs by modality, where neither vLLM nor the
            model's configuration says so.
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
