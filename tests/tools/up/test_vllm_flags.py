"""The flags that `epd up` gives to engines, according to vLLM's own parser."""

import pytest

from epd.tools.up.memory import VLLM_SHARE
from epd.tools.up.plan import plan_fleet
from epd.tools.up.settings import FleetSettings
from epd.tools.up.vllm_flags import flag_value, overrides_config
from tests.paths import MEDIA
from tests.vllm_parser import needs_vllm, parsed


@pytest.mark.full
@needs_vllm
@pytest.mark.e2e
def test_vllm_accepts_every_flag_of_its_instances() -> None:
    """Check first that the parser rejects a misspelt flag."""
    argvs = [
        list(engine.command()[3:])
        for device, gpus in (("cuda", "e=0,{}=1+2"), ("xpu", "e=0,{}=1+2"), ("cpu", None))
        for topology, last in (("1e1p1d", "p=3,d"), ("1e1pd", "pd"))
        for engine in plan_fleet(
            FleetSettings(
                model="a/b",
                device=device,
                topology=topology,
                gpus=gpus and gpus.format(last),
                max_model_len=100,
                max_num_seqs=10,
                served_model_name="name",
                allowed_local_media_path=str(MEDIA),
            ),
            {},
            "file:///ec",
            cores=16,
        ).engines
    ]
    unknown, *known = parsed([["serve", "a/b", "--no-such-flag", "1"], *argvs])

    assert unknown[0] == ["--no-such-flag", "1"]
    encode, consumer = ["ec_producer", None], ["ec_consumer", None]
    prefill, decode = ["ec_consumer", "kv_producer"], [None, "kv_consumer"]
    assert [one[0] for one in known] == [[]] * 15
    assert [one[1:3] for one in known] == [encode, prefill, decode, encode, consumer] * 3
    assert [one[3] for one in known] == [True, True, False, True, False] * 2 + [True] * 5
    assert [one[4] for one in known[:2]] == [False, None]
    assert [one[5] for one in known[:5]] == [1, 1, 2, 1, 2]
    assert [one[6] for one in known[:2]] == [0.01, VLLM_SHARE]
    assert all(one[7] for one in known)
    assert known[0][8] == 16384


@pytest.mark.parametrize(
    "flag",
    ["--hf-overrides", "--hf_overrides={}", "--hf-overrides.text_config.a", "--config=f.yaml"],
)
def test_flags_after_which_the_file_does_not_describe_the_model(flag: str) -> None:
    assert overrides_config(["--enforce-eager", flag])
    assert not overrides_config(["--enforce-eager", "--dtype", "bfloat16"])


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ([], None),
        (["--revision"], None),
        (["--revision", "a"], "a"),
        (["--revision=a", "--x", "--revision", "b", "--y"], "b"),
        (["--revision", "a", "--revision=b=c"], "b=c"),
        (["--code-revision", "a"], None),
    ],
)
def test_the_last_value_of_a_flag_counts(flags: list[str], value: str | None) -> None:
    assert flag_value(flags, "--revision") == value
