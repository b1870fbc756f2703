"""vLLM's own configuration, requests and features, and the connector made of them.

Imported by a fixture when the first test needs it: it takes ten seconds, starts threads and warns.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from ec_store import Entry
from ec_store.backchannel import Sender
from ec_store.counts import Counts
from ec_store.vllm_connector import ECStoreConnector
from ec_store.vllm_connector.worker import Saver

TOKENS, WIDTH = 4, 8


class Pieces:
    """Makes connectors for one model, and what vLLM gives them."""

    def __init__(self, model: Path) -> None:
        self._config = EngineArgs(
            model=str(model),
            served_model_name="tiny",
            dtype="float32",
            enforce_eager=True,
            ec_transfer_config={
                "ec_connector": "ECStoreConnector",
                "ec_connector_module_path": "ec_store.vllm_connector",
                "ec_role": "ec_both",
            },
        ).create_engine_config()

    @property
    def engine(self) -> str:
        return f"{self._config.ec_transfer_config.engine_id}/0"

    def connector(self, options: Mapping[str, Any]) -> ECStoreConnector:
        """A scheduler's, of an engine of its own."""
        transfer = self._config.ec_transfer_config
        transfer.engine_id = f"test-{time.monotonic_ns()}"
        transfer.ec_connector_extra_config = dict(options)
        return ECStoreConnector(self._config, ECConnectorRole.SCHEDULER)

    def transferring(self, connector: str, role: str, **options: Any) -> Any:
        """Configuration of an engine of its own that has one of vLLM's own connectors."""
        config = copy(self._config)
        config.instance_id = f"test-{time.monotonic_ns()}"
        config.ec_transfer_config = ECTransferConfig(
            ec_connector=connector, ec_role=role, ec_connector_extra_config=options
        )
        return config

    def saver(self, connector: ECStoreConnector, store: Any, queue_bytes: int = 10**6) -> Saver:
        """A worker's, of the same engine."""
        return Saver(store, connector.namespace, queue_bytes, Sender(self.engine), Counts())

    @contextmanager
    def model(self, **changes: Any) -> Iterator[None]:
        """Another model, as far as the changes say."""
        with _changed(self._config.model_config, changes):
            yield

    @contextmanager
    def encoder(self, **changes: Any) -> Iterator[None]:
        """Other multimodal options, as far as the changes say."""
        with _changed(self._config.model_config.multimodal_config, changes):
            yield

    @staticmethod
    def feature(
        identifier: str, *, media: bool = True, offset: int = 2, tokens: int = TOKENS
    ) -> MultiModalFeatureSpec:
        """A picture's, with its pixels or with what sizes its placeholder alone."""
        data = {"image_grid_thw": _element(3)}
        if media:
            data["pixel_values"] = _element(4, 6)
        where = PlaceholderRange(offset=offset, length=tokens)
        return MultiModalFeatureSpec(MultiModalKwargsItem(data), "image", identifier, where)

    @staticmethod
    def request(*features: MultiModalFeatureSpec) -> Request:
        return Request("r", [1] * 64, SamplingParams(max_tokens=4), None, mm_features=[*features])

    @staticmethod
    def tensor(fill: float = 1.0, rows: int = TOKENS) -> torch.Tensor:
        return torch.full((rows, WIDTH), fill)

    @classmethod
    def entry(cls, fill: float = 1.0, rows: int = TOKENS) -> Entry:
        """What is stored of a tensor."""
        raw = cls.tensor(fill, rows).view(torch.uint8).reshape(-1).numpy()
        metadata = {"image_grid_thw": [1, 1, 1]}
        return Entry(memoryview(raw).cast("B"), "F32", (rows, WIDTH), "image", metadata)


@contextmanager
def _changed(config: Any, changes: Mapping[str, Any]) -> Iterator[None]:
    before = {name: getattr(config, name) for name in changes}
    for name, value in changes.items():
        setattr(config, name, value)
    yield
    for name, value in before.items():
        setattr(config, name, value)


def _element(*shape: int) -> MultiModalFieldElem:
    return MultiModalFieldElem(torch.ones(shape, dtype=torch.int64), MultiModalBatchedField())
