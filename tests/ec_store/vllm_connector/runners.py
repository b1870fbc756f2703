"""Steps of vLLM's model runner V2, which runs on every GPU, with a fake model and a fake device.

vLLM's own methods run each step: `execute_model` of both runners, the encoder's runner, and the
handle of the EC connector. Their other parts are mocks. A fixture imports this module when the
first test needs it, see `pieces.py`.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.request import Request
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.mm_encoder_model_runner import MMEncoderModelRunner

from tests.ec_store.vllm_connector.pieces import WIDTH, OneProcess

UNUSED = (
    *("aux_output_connector", "is_encoder_decoder", "lora_config", "pcp_manager", "ubatch_runner"),
    "use_aux_hidden_state_outputs",
)
"""Attributes for features that these steps do not use."""


class Model:
    """Fake model.

    Attributes:
        encode: called for an encode of this number of items; returns their outputs.
        read: called where the language model reads the encoder cache.
        forward: called where the language model runs.
    """

    def __init__(self) -> None:
        self.encode: Callable[[int], Sequence[Any]] = lambda _: ()
        self.read: Callable[[], None] = lambda: None
        self.forward: Callable[[], None] = lambda: None

    def embed_multimodal(self, pixel_values: torch.Tensor, **_: Any) -> Sequence[Any]:
        return self.encode(len(pixel_values))

    def __call__(self, **_: Any) -> torch.Tensor:
        self.forward()
        return torch.zeros(1)


class Runner:
    """Runner of an encode instance, or of an instance with a language model."""

    def __init__(
        self, engine: OneProcess, model: Model, monkeypatch: pytest.MonkeyPatch, *, encodes: bool
    ) -> None:
        self._engine = engine
        self._class: type[GPUModelRunner] = MMEncoderModelRunner if encodes else GPUModelRunner
        cache = EncoderCache()
        cache.encoder_outputs = engine.cache
        self._features = cache.mm_features
        state = MagicMock(encoder_cache=cache)
        state.encoder_runner = EncoderRunner(
            model, 1, WIDTH, cache, torch.float32, torch.device("cpu")
        )
        state.execute_mm_encoder = partial(ModelState.execute_mm_encoder, state)
        state.prepare_inputs.return_value = {}

        def prepare(scheduled: dict[str, list[int]], *_: Any) -> torch.Tensor:
            state.execute_mm_encoder(scheduled)
            model.read()
            return torch.zeros(1)

        state.prepare_inputs_embeds = prepare
        sizes = {"dcp_size": 1, "dp_size": 1, "vocab_size": 1}
        self.runner = MagicMock(
            ec_connector=engine.active,
            model_state=state,
            model=model,
            **sizes,
            **dict.fromkeys(UNUSED),
        )
        self.runner.observability_config.cudagraph_metrics = False
        self.runner.gather_batch_req_state.return_value = (MagicMock(), None)
        self.runner.prepare_attn.return_value = ((), {})
        self.runner.kv_connector.no_forward.return_value = EMPTY_MODEL_RUNNER_OUTPUT
        for name in ("_no_forward", "_merge_ec_connector_no_forward"):
            if hasattr(self._class, name):
                setattr(self.runner, name, partial(getattr(self._class, name), self.runner))
        counts = {"num_tokens": 1, "num_reqs": 1, "num_ubatches": 1, "num_active_loras": 0}
        batch = SimpleNamespace(cg_mode=CUDAGraphMode.NONE, **counts)
        monkeypatch.setattr(model_runner, "dispatch_cg_and_sync_dp", lambda *_, **__: (batch, None))
        monkeypatch.setattr(model_runner, "set_forward_context", lambda *_, **__: nullcontext())
        monkeypatch.setattr(model_runner, "build_slot_mappings_by_layer", lambda *_: {})

    def step(self, *requests: Request, encoded: Sequence[int] = (), tokens: int = 1) -> None:
        """Run a step in which these requests are new.

        Args:
            requests: new requests, each with its own id.
            encoded: indices of the items that the step encodes, the same for each request.
            tokens: number of scheduled tokens of each request.
        """
        scheduled = self._engine.scheduled(*requests)
        names = [request.request_id for request in requests]
        self._features |= {request.request_id: request.mm_features for request in requests}
        scheduled.num_scheduled_tokens = dict.fromkeys(names, tokens) if tokens else {}
        scheduled.total_num_scheduled_tokens = tokens * len(names)
        scheduled.scheduled_encoder_inputs = {name: [*encoded] for name in names if encoded}
        scheduled.num_spec_tokens_to_schedule = 0
        scheduled.encoder_input_updates, scheduled.skip_drafts = {}, False  # since 0.33
        self._class.execute_model(self.runner, scheduled)
