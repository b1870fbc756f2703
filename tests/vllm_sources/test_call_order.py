"""Order in which vLLM calls the EC connector in a step, in the sources of each release.

`tests/ec_store/vllm_connector/test_model_runner.py` runs these steps with the installed release.
"""

import ast
from collections.abc import Sequence

import pytest

from tests.vllm_sources.reading import Source, methods, sources

SOURCES = sources()
pytestmark = [
    pytest.mark.parametrize(
        "vllm", SOURCES or [None], ids=[one.name for one in SOURCES] or ["none"]
    ),
    pytest.mark.skipif(
        not SOURCES, reason="no sources of vLLM: scripts/test.sh installs it, check_vllm.sh fetches"
    ),
]

YIELD = "yield"
"""Place of the step's work in a context manager."""
BEFORE = ("bind_connector_metadata", "start_save_caches", "start_load_caches")
AFTER = ("build_connector_worker_meta", "clear_connector_metadata")
ENCODERS = "v1/worker/mm_encoder_model_runner.py"
RUNNER = "v1/worker/gpu/model_runner.py"
STATES = "v1/worker/gpu/model_states"
HANDLE = "v1/worker/gpu/ec_connector.py"


def method_of(vllm: Source, path: str, name: str, method: str) -> ast.AST:
    return methods(vllm.a_class(path, name))[method]


def calls(*nodes: ast.AST) -> list[str]:
    """Return the methods that code calls, in the order of the source."""
    found: list[tuple[int, int, str]] = []
    for node in (below for root in nodes for below in ast.walk(root)):
        match node:
            case ast.Call(func=ast.Attribute(attr=called) as at):
                found.append((at.end_lineno or 0, at.end_col_offset or 0, called))
            case ast.Yield():
                found.append((node.lineno, node.col_offset, YIELD))
    return [called for _, _, called in sorted(found)]


def within(method: ast.AST, context: str) -> list[str]:
    """Return the methods that code calls within the only `with` of this context manager."""
    [block] = [
        node
        for node in ast.walk(method)
        if isinstance(node, ast.With)
        and context in calls(*(one.context_expr for one in node.items))
    ]
    return calls(*block.body)


def those(order: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the calls of these methods."""
    return [name for name in order if name in names]


def test_model_runner_v2_loads_before_and_saves_after_the_work_of_a_step(vllm: Source) -> None:
    order = calls(method_of(vllm, HANDLE, "ActiveECConnector", "maybe_get_output"))
    steps = (*BEFORE, YIELD, "save_caches", "get_finished", "get_ec_connector_stats", *AFTER)

    # The first one is that of a step without metadata of the connector.
    assert those(order, steps) == [YIELD, *steps]


def test_model_runner_v1_loads_before_the_work_of_a_step(vllm: Source) -> None:
    path = "v1/worker/ec_connector_model_runner_mixin.py"
    mixin = "ECConnectorModelRunnerMixin"
    order = calls(method_of(vllm, path, mixin, "_get_ec_connector_output"))
    steps = (*BEFORE, YIELD, "get_finished", *AFTER)

    assert those(order, steps) == [*steps]


def test_a_step_without_a_forward_pass_calls_the_connector_too(vllm: Source) -> None:
    empty = calls(method_of(vllm, HANDLE, "ActiveECConnector", "no_forward"))

    assert empty[0] == "maybe_get_output"
    for path, name, method in (
        (RUNNER, "GPUModelRunner", "execute_model"),
        (ENCODERS, "MMEncoderModelRunner", "_no_forward"),
    ):
        order = calls(method_of(vllm, path, name, method))
        passed_on = those(order, ["no_forward", "_merge_ec_connector_no_forward"])
        assert passed_on in (
            ["no_forward", "_merge_ec_connector_no_forward"] * 2,
            ["_merge_ec_connector_no_forward", "no_forward"],  # as its argument
        )
    merge = method_of(vllm, RUNNER, "GPUModelRunner", "_merge_ec_connector_no_forward")
    assert "no_forward" in calls(merge)


def test_the_connector_is_called_around_the_encoder_and_before_the_model(vllm: Source) -> None:
    decoder = method_of(vllm, RUNNER, "GPUModelRunner", "execute_model")
    models = ["run_fullgraph", "run_pw_graph", "model"]
    steps = ["maybe_get_output", "prepare_inputs_embeds", *models, "finish_forward"]
    assert those(calls(decoder), steps) == steps
    assert within(decoder, "maybe_get_output") == ["prepare_inputs_embeds"]

    encoder = method_of(vllm, ENCODERS, "MMEncoderModelRunner", "execute_model")
    steps = ["_no_forward", "maybe_get_output", "execute_mm_encoder", "with_ec_conn_output"]
    assert those(calls(encoder), steps) == steps
    assert within(encoder, "maybe_get_output") == ["execute_mm_encoder"]


def test_the_encoder_runs_before_the_encoder_cache_is_read(vllm: Source) -> None:
    prepare = method_of(vllm, f"{STATES}/default.py", "DefaultModelState", "prepare_inputs_embeds")
    steps = ["execute_mm_encoder", "gather_mm_embeddings", "get_inputs_embeds"]
    assert those(calls(prepare), steps) == steps

    encode = method_of(vllm, f"{STATES}/interface.py", "ModelState", "execute_mm_encoder")
    steps = ["prepare_mm_inputs", "execute_mm_encoder", "update"]
    assert those(calls(encode), steps) == steps
