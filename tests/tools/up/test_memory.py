"""Shares of devices' memory that the instances of a fleet get."""

from collections.abc import Mapping
from typing import Any

import pytest

from epd.tools.up.plan import FleetPlan, plan_fleet
from epd.tools.up.settings import FleetSettings


def plan(gpus: str, topology: str = "1e1p1d", **values: Any) -> FleetPlan:
    settings = FleetSettings(**{"model": "m", "gpus": gpus, "topology": topology, **values})
    return plan_fleet(settings, {"CUDA_VISIBLE_DEVICES": ""}, "file:///ec", dry_run=True)


def shares(fleet: FleetPlan) -> dict[str, float | None]:
    return {engine.name.partition("-8")[0]: engine.memory for engine in fleet.engines}


def test_an_instance_alone_on_its_device_gets_vllms_own_share() -> None:
    """Of an encode instance vLLM only checks that its share is free."""
    alone = plan("e=0,p=1,d=2+3")

    assert shares(alone) == {"encode": 0.01, "prefill": None, "decode": None}
    assert alone.memory[1] == "device 1: prefill-8300 0.92, vLLM's own"


def test_instances_divide_what_an_encode_instance_leaves() -> None:
    fleet = plan("e=0,p=0,d=0")

    assert shares(fleet) == {"encode": 0.01, "prefill": 0.41, "decode": 0.41}
    assert fleet.memory == (
        "device 0: encode-8200 0.1; prefill-8300 0.41; decode-8400 0.41",
        "the share of an encode instance is assumed: --gpu-memory-utilization-e sets another",
    )


def test_an_instance_of_two_devices_gets_the_share_that_both_can_give() -> None:
    assert shares(plan("e=1,p=0,d=0+1"))["decode"] == 0.46


def test_the_operators_shares_come_first() -> None:
    given = plan("e=0,p=0,d=0", gpu_memory_utilization_p=0.3)
    encode = plan("e=0,pd=0", "1e1pd", gpu_memory_utilization_e=0.3)
    flag = plan("e=0,pd=0", "1e1pd", decode_flags="--gpu-memory-utilization=0.5")
    both = plan("e=0,pd=0", "1e1pd", vllm_flags="--gpu-memory-utilization 0.9")

    assert shares(given) == {"encode": 0.01, "prefill": 0.3, "decode": 0.52}
    assert shares(encode) == {"encode": 0.3, "prefill-decode": 0.62}
    assert encode.memory == ("device 0: encode-8200 0.3; prefill-decode-8400 0.62",)
    assert shares(flag)["prefill-decode"] == 0.5
    assert shares(both)["prefill-decode"] == 0.9


@pytest.mark.fault(104)
@pytest.mark.parametrize(
    "values",
    [
        {"gpu_memory_utilization_p": 0.7, "gpu_memory_utilization_d": 0.7},
        {"prefill_flags": "--gpu-memory-utilization 0.7", "gpu_memory_utilization_d": 0.7},
    ],
)
def test_instances_that_do_not_fit_are_refused_with_the_sum(values: Mapping[str, Any]) -> None:
    message = (
        r"instances need 1\.5 of the memory of device 0: encode-8200 0\.1; "
        r"prefill-8300 0\.7; decode-8400 0\.7\. Use more devices"
    )
    with pytest.raises(ValueError, match=message):
        plan("e=0,p=0,d=0", **values)


def test_an_instance_needs_a_share_that_the_others_leave() -> None:
    with pytest.raises(ValueError, match=r"need 0\.92 of the memory .*prefill-8300 0; decode"):
        plan("e=1,p=0,d=0", gpu_memory_utilization_d=0.92)
