"""Memory of devices: sizes of models, and what the instances of a fleet get."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from epd.tools.up.memory import CONTEXT_BYTES, VLLM_SHARE
from epd.tools.up.model_sizes import ModelSizes, checkpoint_tensors, model_sizes
from epd.tools.up.plan import FleetPlan, plan_fleet
from epd.tools.up.settings import FleetSettings

GIB = 2**30
SIZES = ModelSizes(weights=16 * GIB, encoders=GIB, token=2**17, estimated=False)
VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "spatial_merge_size": 2,
    "out_hidden_size": 3584,
}
TEXT = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
QWEN_7B: Mapping[str, Any] = MappingProxyType(
    {**TEXT, "vision_config": VISION, "tie_word_embeddings": False}
)
"""Configuration of Qwen2.5-VL-7B, as far as sizes depend on it."""


def test_weights_are_estimated_from_a_configuration() -> None:
    """The parameters were counted in transformers' Qwen2_5_VLForConditionalGeneration."""
    sizes = model_sizes(QWEN_7B)
    nested = {"text_config": TEXT, "vision_config": VISION, "tie_word_embeddings": False}

    assert sizes.weights == pytest.approx(2 * 8_292_166_656, rel=0.01)
    assert sizes.encoders == pytest.approx(2 * 676_550_144, rel=0.01)
    assert sizes.estimated
    assert model_sizes(nested) == model_sizes({"thinker_config": nested}) == sizes


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "awq", "bits": 4}, 4),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 4),
        ({"quant_method": "new"}, 16),
    ],
)
def test_quantized_layers_are_estimated_as_such(quantization: dict[str, Any], bits: int) -> None:
    text = dict(TEXT, vocab_size=0)
    full = model_sizes({"text_config": text}).weights
    quantized = model_sizes({"text_config": text, "quantization_config": quantization}).weights

    assert quantized == pytest.approx(full * bits / 16)


def test_each_expert_of_a_layer_counts() -> None:
    dense = dict(TEXT, vocab_size=0, intermediate_size=800)
    experts = dict(TEXT, vocab_size=0, num_experts=8, moe_intermediate_size=100)

    assert model_sizes(experts).weights == model_sizes(dense).weights


def test_activations_grow_with_the_encoder() -> None:
    wide = dict(VISION, intermediate_size=6840)

    assert model_sizes({"vision_config": wide}).token > model_sizes(QWEN_7B).token > 0
    assert model_sizes(TEXT).token == 0


def write_checkpoint(file: Path, **tensors: tuple[str, int]) -> None:
    """Write a safetensors file with these dtypes and bytes of tensors, without their values."""
    header, end = dict[str, Any](), 0
    for name, (dtype, size) in tensors.items():
        header[name.replace("__", ".")] = {"dtype": dtype, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps({**header, "__metadata__": {}}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)


def test_a_checkpoint_has_the_bytes_that_vllm_loads(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path / "model.safetensors",
        visual__blocks__0__weight=("BF16", 100),
        model__layers__0__weight=("F32", 800),
        lm_head__weight=("F8_E4M3", 50),
        talker__weight=("BF16", 999),
    )
    tensors = checkpoint_tensors(tmp_path)
    sizes = model_sizes(QWEN_7B, tensors)

    assert (sizes.weights, sizes.encoders, sizes.estimated) == (550, 100, False)
    assert sizes.token == model_sizes(QWEN_7B).token


@pytest.mark.parametrize("files", [(), ("model-1.safetensors",)])
def test_an_incomplete_checkpoint_has_no_size(tmp_path: Path, files: tuple[str, ...]) -> None:
    for name in files:
        write_checkpoint(tmp_path / name, weight=("BF16", 2))
        weight_map = {"weight": name, "other": "model-2.safetensors"}
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert checkpoint_tensors(tmp_path) is None
        write_checkpoint(tmp_path / "model-2.safetensors", other=("BF16", 4))
        assert checkpoint_tensors(tmp_path) == {"weight": 2, "other": 4}
        return
    assert checkpoint_tensors(tmp_path) is None


@pytest.mark.parametrize(
    "content", [b"", b"12", struct.pack("<Q", 2**40), struct.pack("<Q", 2) + b"[]"]
)
def test_a_damaged_checkpoint_has_no_size(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)

    assert checkpoint_tensors(tmp_path) is None


def plan(
    gpus: str, topology: str = "1e1p1d", sizes: ModelSizes | None = SIZES, **values: Any
) -> FleetPlan:
    settings = FleetSettings(**{"model": "m", "gpus": gpus, "topology": topology, **values})
    return plan_fleet(
        settings, {"CUDA_VISIBLE_DEVICES": ""}, "file:///ec", sizes=sizes, dry_run=True
    )


def shares(fleet: FleetPlan) -> dict[str, float | None]:
    return {engine.name.partition("-8")[0]: engine.memory for engine in fleet.engines}


def test_an_instance_alone_on_its_device_gets_vllms_own_share() -> None:
    """Of an encode instance vLLM only checks that its share is free."""
    alone = plan("e=0,p=1,d=2+3", device_memory="80GiB")

    assert shares(alone) == {"encode": 0.01, "prefill": None, "decode": None}
    assert alone.memory[1] == "device 1, 80.0 GiB: prefill-8300 73.6 GiB, vLLM's own share"


def test_instances_divide_what_an_encode_instance_leaves() -> None:
    fleet = plan(
        "e=0,p=0,d=0", device_memory="100GiB", encode_flags="--max-num-batched-tokens 8192"
    )
    # The encoder, 8192 tokens of 128 KiB, and three processes.
    left = VLLM_SHARE * 100 - 1 - 1 - 3 * CONTEXT_BYTES / GIB

    assert shares(fleet) == {"encode": 0.01, "prefill": 0.435, "decode": 0.435}
    assert left / 2 == pytest.approx(43.5)
    assert fleet.memory[0] == (
        "device 0, 100.0 GiB: "
        "encode-8200 3.0 GiB (encoder 1.0 GiB, a step of 8192 tokens 1.0 GiB, CUDA 1.0 GiB); "
        "prefill-8300 43.5 GiB (weights 16.0 GiB, CUDA 1.0 GiB); "
        "decode-8400 43.5 GiB (weights 16.0 GiB, CUDA 1.0 GiB)"
    )


def test_an_instance_of_two_devices_gets_the_share_that_both_can_give() -> None:
    """Its weights are divided over them."""
    fleet = plan("p=0,d=0+1", topology="1p1d", device_memory="50GiB")
    got = shares(fleet)
    free = VLLM_SHARE * 50 - 16 - 8 - 2

    assert got["prefill"] == pytest.approx((16 + free / 2) / 50, abs=0.001)
    assert got["decode"] == pytest.approx((8 + free / 2) / 50, abs=0.001)


def test_shares_need_neither_sizes_nor_memory() -> None:
    assert shares(plan("e=0,pd=0", "1e1pd", None)) == {"encode": 0.01, "prefill-decode": 0.82}
    assert shares(plan("e=0,p=0,d=0", sizes=None)) == {
        "encode": 0.01,
        "prefill": 0.41,
        "decode": 0.41,
    }
    fleet = plan("e=0,pd=0", "1e1pd")
    assert fleet.memory == (
        "device 0: encode-8200 0.1; prefill-decode-8400 0.82",
        "shares of the devices' memory; --device-memory 80GiB plans in GiB",
    )
    unknown = plan("e=0,pd=0", "1e1pd", None, device_memory="100GiB")
    assert unknown.memory[-1].startswith("the sizes of the model are not known")
    known = plan("e=0,pd=0", "1e1pd", device_memory="100GiB")
    assert known.memory[-1] == "activations and CUDA are estimates"


@pytest.mark.parametrize("flags", ["--quantization fp8", "-q fp8", "--cpu-offload-gb=12"])
def test_a_model_that_vllm_makes_smaller_is_not_refused(flags: str) -> None:
    few = "--max-num-batched-tokens 1024"
    with pytest.raises(ValueError, match="instances need"):
        plan("e=0,pd=0", "1e1pd", device_memory="16GiB", encode_flags=few)

    fleet = plan("e=0,pd=0", "1e1pd", device_memory="16GiB", encode_flags=few, vllm_flags=flags)
    assert "weights" not in fleet.memory[0]


def test_the_operators_shares_come_first() -> None:
    given = plan("e=0,p=0,d=0", device_memory="100GiB", gpu_memory_utilization_p=0.3)
    encode = plan("e=0,pd=0", "1e1pd", gpu_memory_utilization_e=0.3)
    flag = plan("e=0,pd=0", "1e1pd", decode_flags="--gpu-memory-utilization=0.5")
    both = plan("e=0,pd=0", "1e1pd", vllm_flags="--gpu-memory-utilization 0.9", sizes=None)

    assert shares(given)["prefill"] == 0.3
    assert shares(given)["decode"] == pytest.approx(0.92 - 0.3 - 0.05, abs=0.01)
    assert shares(encode) == {"encode": 0.3, "prefill-decode": 0.62}
    assert shares(flag)["prefill-decode"] == 0.5
    assert shares(both)["prefill-decode"] == 0.9


def test_an_unknown_step_of_an_encode_instance_has_an_assumed_share() -> None:
    fleet = plan(
        "e=0,pd=0", "1e1pd", device_memory="100GiB", encode_flags="--max-num-batched-tokens=16k"
    )

    assert fleet.memory[0].startswith("device 0, 100.0 GiB: encode-8200 10.0 GiB; prefill-decode-")


def test_media_that_are_prepared_on_the_device_take_memory_there() -> None:
    """Each API server is a process on the device."""
    flags = "--mm-tensor-ipc torch_shm --api-server-count 3"
    fleet = plan("e=0,pd=1", "1e1pd", device_memory="80GiB", encode_flags=flags)

    assert "CUDA 4.0 GiB" in fleet.memory[0]


@pytest.mark.fault(104)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"device_memory": "40GiB"},
            (
                r"instances need 50\.0 GiB of the memory of device 0, 40\.0 GiB: "
                r"encode-8200 16\.0 GiB "
                r"\(encoder 1\.0 GiB, a step of 114688 tokens 14\.0 GiB, CUDA 1\.0 GiB\); "
                r"prefill-8300 17\.0 GiB \(weights 16\.0 GiB, CUDA 1\.0 GiB\); decode-8400 "
            ),
        ),
        (
            {"gpu_memory_utilization_p": 0.7, "gpu_memory_utilization_d": 0.7},
            (
                r"instances need 1\.5 of the memory of device 0: encode-8200 0\.1; "
                r"prefill-8300 0\.7; decode-8400 0\.7\. Use more devices"
            ),
        ),
        (
            {"device_memory": "60GiB", "sizes": ModelSizes(30 * GIB, GIB, 1.0, estimated=True)},
            "weights are estimates from config.json",
        ),
    ],
)
def test_instances_that_do_not_fit_are_refused_with_the_sum(
    values: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan("e=0,p=0,d=0", encode_flags="--max-num-batched-tokens 114688", **values)


def test_chosen_shares_overrule_an_estimate() -> None:
    chosen: dict[str, Any] = {f"gpu_memory_utilization_{letter}": 0.3 for letter in "epd"}
    fleet = plan("e=0,p=0,d=0", device_memory="40GiB", **chosen)

    assert set(shares(fleet).values()) == {0.3}
