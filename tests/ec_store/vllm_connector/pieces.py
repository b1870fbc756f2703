"""Connectors made of vLLM's own configuration, requests and features.

A fixture imports this module when the first test needs it: that takes ten seconds, starts threads
and warns.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub._revision import ResolvedRevision
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import ECTransferConfig
from vllm.distributed import parallel_state
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.multimodal.cache import LruKeyReplicatedReceiverCache
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.config import get_config, register_config_parser
from vllm.transformers_utils.config_parser_base import ConfigParserBase
from vllm.v1.request import Request
from vllm.v1.worker.gpu.ec_connector import ActiveECConnector

from ec_store import Entry
from ec_store.counts import Counts
from ec_store.engine.backchannel import Receiver, Sender
from ec_store.engine.fetcher import Fetcher
from ec_store.engine.host_memory import HostMemory
from ec_store.engine.tensors import DTYPES, Loader
from ec_store.vllm_connector import ECStoreConnector
from ec_store.vllm_connector.consumer import Consumer
from ec_store.vllm_connector.namespace import layout_of, namespace_of
from ec_store.vllm_connector.widths import Widths
from ec_store.vllm_connector.worker import Learner, Saver, StepMetadata, is_writer, load, reader
from scripts.forked import inspect_in_process
from tests.ec_store.waiting import until

TOKENS, WIDTH = 4, 256


class Pieces:
    """Factory of connectors for one model, and of vLLM's objects that they receive."""

    def __init__(self, model: Path) -> None:
        inspect_in_process()
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
        # As on a GPU; on CPUs, vLLM runs its single worker in a separate process.
        self._config.parallel_config.distributed_executor_backend = "uni"

    loader = DefaultModelLoader

    @property
    def engine(self) -> str:
        return f"{self._config.ec_transfer_config.engine_id}/0"

    def connector(self, options: Mapping[str, Any]) -> ECStoreConnector:
        """Return a scheduler's connector of a new engine."""
        transfer = self._config.ec_transfer_config
        transfer.engine_id = f"test-{time.monotonic_ns()}"
        transfer.ec_connector_extra_config = dict(options)
        return ECStoreConnector(self._config, ECConnectorRole.SCHEDULER)

    def worker(self, monkeypatch: pytest.MonkeyPatch) -> ECStoreConnector:
        """Return the connector of the only worker of the latest engine."""
        self.be_rank(monkeypatch)
        return ECStoreConnector(self._config, ECConnectorRole.WORKER)

    @staticmethod
    def be_rank(
        monkeypatch: pytest.MonkeyPatch,
        tensor: int = 0,
        ranks: int = 1,
        *,
        first_stage: bool = True,
        context: int = 0,
    ) -> None:
        """Let vLLM report this process as a rank of its parallel groups."""
        values = {
            "get_tensor_model_parallel_rank": tensor,
            "get_tensor_model_parallel_world_size": ranks,
            "get_pp_group": SimpleNamespace(is_first_rank=first_stage),
            "get_pcp_group": SimpleNamespace(rank_in_group=context),
        }
        for name, value in values.items():
            monkeypatch.setattr(parallel_state, name, Mock(return_value=value))

    def engine_of_one_process(
        self, options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> "OneProcess":
        """Return both connectors of an engine, with model runner V2's handle of the worker's."""
        scheduler = self.connector(options)
        worker = self.worker(monkeypatch)
        monkeypatch.setattr("vllm.v1.worker.gpu.ec_connector.get_ec_transfer", lambda: worker)
        cache: dict[str, torch.Tensor] = {}
        return OneProcess(scheduler, worker, cache, ActiveECConnector(self._config, cache))

    def media_cache(self) -> LruKeyReplicatedReceiverCache:
        """Return an engine's cache of preprocessed media."""
        return LruKeyReplicatedReceiverCache(self._config.model_config)

    @staticmethod
    def writes() -> bool:
        return is_writer()

    def transferring(self, connector: str, role: str, **options: Any) -> Any:
        """Return the configuration of a new engine with one of vLLM's own connectors."""
        config = copy(self._config)
        config.instance_id = f"test-{time.monotonic_ns()}"
        config.ec_transfer_config = ECTransferConfig(
            ec_connector=connector, ec_role=role, ec_connector_extra_config=options
        )
        return config

    def namespace(self, generation: int = 0) -> str:
        """Return the namespace that a connector of this configuration derives."""
        return namespace_of(self._config, generation)

    def page(self, **options: Any) -> bytes:
        """Return the `/metrics` page of an engine with these options."""
        registry = CollectorRegistry()
        kinds = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
        transfer = self._config.ec_transfer_config
        with _changed(transfer, {"ec_connector_extra_config": {"store": "file:///", **options}}):
            ECStoreConnector.build_prom_metrics(
                self._config, kinds, ["model_name", "engine"], {0: ["tiny", "0"], 1: ["tiny", "1"]}
            )
        return generate_latest(registry)

    def widths(
        self, stated: Mapping[str, int] | None = None, measured: Mapping[str, int] | None = None
    ) -> Widths:
        """Return the widths for this configuration, given the values that vLLM has measured."""
        with _changed(
            self._config.ec_transfer_config, {"mm_encoder_output_widths": dict(measured or {})}
        ):
            return Widths(self._config, stated or {})

    def consumer(self, fetcher: Fetcher, counts: Counts) -> Consumer:
        """Return the scheduler's side with this fetcher."""
        model_config = self._config.model_config
        resolver = PlaceholderMetadataResolver(model_config)
        return Consumer(fetcher, model_config, resolver, self.widths(), counts)

    def receiver(self) -> Receiver:
        """Return the scheduler's end of the latest connector's engine."""
        return Receiver(self.engine)

    def learner(self) -> Learner:
        """Return the worker's end of the latest connector's engine."""
        return Learner(Sender(self.engine), Counts())

    @staticmethod
    def parsed(source: str | Path, config_format: str = "hf") -> Any:
        """Return a model's configuration, as vLLM parses it."""
        return get_config(str(source), trust_remote_code=False, config_format=config_format)

    @staticmethod
    def register_config_format(name: str, folder: Path) -> None:
        """Register a config format that vLLM reads from this folder for any model."""

        @register_config_parser(name)
        class Parser(ConfigParserBase):  # type: ignore[misc]  # the base class is untyped
            def parse(self, *_: Any, **__: Any) -> tuple[dict[str, Any], Any]:
                config = get_config(str(folder), trust_remote_code=False, config_format="hf")
                return {}, config

    @staticmethod
    def revision(branch: str, commit: str) -> ResolvedRevision:
        """Return a branch of the hub, resolved as vLLM resolves it."""
        return ResolvedRevision(commit, initial=branch, repo_id="some/model")

    @staticmethod
    def layout(version: str) -> int | str:
        return layout_of(version)

    def saver(
        self,
        connector: ECStoreConnector,
        store: Any,
        queue_bytes: int = 10**6,
        namespace: str | None = None,
    ) -> Saver:
        """Return the worker's saver of the same engine."""
        written_to = namespace or connector.namespace
        return Saver(store, written_to, queue_bytes, Sender(self.engine), Counts())

    @contextmanager
    def model(self, **changes: Any) -> Iterator[None]:
        """Change the model configuration for the duration of the context."""
        with _changed(self._config.model_config, changes):
            yield

    @contextmanager
    def loading(self, **changes: Any) -> Iterator[None]:
        """Change `LoadConfig`, and so the weights, for the duration of the context."""
        with _changed(self._config.load_config, changes):
            yield

    @contextmanager
    def role(self, name: str) -> Iterator[None]:
        """Configure `ec_producer`, `ec_consumer` or `ec_both` for the duration of the context."""
        with _changed(self._config.ec_transfer_config, {"ec_role": name}):
            yield

    @contextmanager
    def ranks(self, tensor: int, stages: int = 1, hosts: int = 1) -> Iterator[None]:
        """Configure several workers in separate processes for the duration of the context."""
        changes = {
            "distributed_executor_backend": "mp",
            "world_size": tensor * stages,
            "pipeline_parallel_size": stages,
            "nnodes": hosts,
        }
        with _changed(self._config.parallel_config, changes):
            yield

    @staticmethod
    def load(
        loader: Loader, step: StepMetadata, host: HostMemory | None = None
    ) -> dict[str, torch.Tensor]:
        """Return a worker's encoder cache after the loads of a step."""
        cache: dict[str, torch.Tensor] = {}
        load(loader, step, cache, host)
        if step.shared is not None:
            loader.map_shared(step.shared)
            loader.finish(step.shared.number)
        loader.report_copies()
        return cache

    @staticmethod
    def reader() -> int | None:
        return reader()

    @contextmanager
    def encoder(self, **changes: Any) -> Iterator[None]:
        """Change the multimodal options for the duration of the context."""
        with _changed(self._config.model_config.multimodal_config, changes):
            yield

    @staticmethod
    def feature(
        identifier: str, *, media: bool = True, offset: int = 2, tokens: int = TOKENS
    ) -> MultiModalFeatureSpec:
        """Return a picture's feature, with its pixels or only the fields of its placeholder."""
        data = {"image_grid_thw": _element(3)}
        if media:
            data["pixel_values"] = _element(4, 6)
        where = PlaceholderRange(offset=offset, length=tokens)
        return MultiModalFeatureSpec(MultiModalKwargsItem(data), "image", identifier, where)

    @staticmethod
    def request(*features: MultiModalFeatureSpec, max_tokens: int = 1) -> Request:
        """Return a request of a proxy, which asks for one token, or one of a client."""
        sampling = SamplingParams(max_tokens=max_tokens)
        return Request("r", [1] * 64, sampling, None, mm_features=[*features])

    @staticmethod
    def tensor(fill: float = 1.0, rows: int = TOKENS) -> torch.Tensor:
        return torch.full((rows, WIDTH), fill)

    @classmethod
    def entry(cls, fill: float = 1.0, rows: int = TOKENS) -> Entry:
        """Return an entry with a tensor of this value."""
        return cls.stored(cls.tensor(fill, rows))

    @staticmethod
    def stored(tensor: torch.Tensor) -> Entry:
        """Return the entry of this tensor."""
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        metadata = {"image_grid_thw": [1, 1, 1]}
        dtype = DTYPES[tensor.dtype]
        return Entry(memoryview(raw).cast("B"), dtype, tuple(tensor.shape), "image", metadata)


@dataclass(frozen=True)
class OneProcess:
    """Scheduler and worker of an engine.

    Attributes:
        scheduler: the scheduler's connector.
        worker: the worker's connector.
        cache: the worker's encoder cache.
        active: handle through which model runner V2 calls the worker's connector.
    """

    scheduler: ECStoreConnector
    worker: ECStoreConnector
    cache: dict[str, torch.Tensor]
    active: ActiveECConnector

    def scheduled(self, *requests: Request) -> Any:
        """Return the output of vLLM's scheduler for a step."""
        step = SimpleNamespace(scheduled_new_reqs=requests, finished_req_ids=set())
        step.ec_connector_metadata = self.scheduler.build_connector_meta(step)
        return step

    def step(self, *requests: Request) -> AbstractContextManager[Any]:
        """Return the context of a step with new requests; the model encodes inside it."""
        step: AbstractContextManager[Any] = self.active.maybe_get_output(self.scheduled(*requests))
        return step

    def settle(self, request: Request) -> None:
        """Wait until the request may be scheduled."""
        until(lambda: self.scheduler.ensure_cache_available(request, 0))


@contextmanager
def _changed(config: Any, changes: Mapping[str, Any]) -> Iterator[None]:
    before = {name: getattr(config, name) for name in changes}
    for name, value in changes.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _element(*shape: int) -> MultiModalFieldElem:
    return MultiModalFieldElem(torch.ones(shape, dtype=torch.int64), MultiModalBatchedField())
