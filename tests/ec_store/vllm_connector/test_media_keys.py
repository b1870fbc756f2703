"""Keys that vLLM gives to media items: which flags of an encode instance change them."""

import importlib
from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from ec_store.keys import key_or_none

KEY = "0123456789abcdef"


@pytest.fixture
def encode(vllm: Any) -> Any:
    """Return the configuration of an encode instance, with multimodal settings of its own."""
    config = vllm.transferring("ECStoreConnector", "ec_producer", store="file:///store")
    config.model_config = copy(config.model_config)
    config.model_config.multimodal_config = copy(config.model_config.multimodal_config)
    config.model_config.multimodal_config.media_io_kwargs = {}
    return config


@pytest.fixture
def cuda(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a CUDA device and an installed torchcodec while vLLM resolves its settings."""
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(device_type="cuda"))
    monkeypatch.setattr("vllm.utils.import_utils.check_torchcodec_available", lambda: None)


def resolved(config: Any) -> dict[str, str]:
    """Return the keys of a picture and a video that are both sent under `KEY`, by modality."""
    config._resolve_mm_processor_device()  # noqa: SLF001
    config._resolve_mm_video_decode_device()  # noqa: SLF001
    params = importlib.import_module("vllm.renderers.params").ChatParams()
    media_io = config.model_config.multimodal_config.media_io_kwargs
    params = params.with_defaults(default_media_io_kwargs=media_io)
    inputs = importlib.import_module("vllm.multimodal.processing.inputs").ProcessorInputs(
        [],
        {modality: SimpleNamespace(get_all_items_for_hash=lambda: [b""]) for modality in KINDS},
        {modality: [KEY] for modality in KINDS},
        media_io_kwargs=params.media_io_kwargs or {},
    )
    keys = inputs.get_mm_hashes("model", "blake3")
    return {modality: key for modality, [key] in keys.items()}


KINDS = ("image", "video")


@pytest.mark.usefixtures("cuda")
def test_keys_of_an_encode_instance_of_epd_up_are_those_that_consumers_look_up(encode: Any) -> None:
    assert resolved(encode) == {"image": KEY, "video": KEY}
    assert encode.model_config.multimodal_config.get_mm_processor_device_type() is None


@pytest.mark.fault(106)
@pytest.mark.usefixtures("cuda")
def test_processor_on_the_device_changes_the_keys_of_videos(encode: Any) -> None:
    """NVDEC is the reason; vLLM selects it unless `--mm-processor-device` is `cpu`."""
    settings = encode.model_config.multimodal_config
    settings.mm_tensor_ipc = "torch_shm"
    keys = resolved(encode)

    assert settings.get_mm_processor_device_type() == "cuda"
    assert settings.media_io_kwargs["video"] == {"backend": "torchcodec", "device": "cuda"}
    assert keys["image"] == KEY
    assert KEY not in keys["video"]


def names(config: Any, request: int) -> list[str | None]:
    """Return the names of two equal pictures of a request; only the first one has a `uuid`."""
    parse = importlib.import_module("vllm.multimodal.parse")
    renderer = importlib.import_module("vllm.renderers.base").BaseRenderer
    pictures = {"image": [Image.new("RGB", (8, 8))] * 2}
    this = SimpleNamespace(model_config=config.model_config, config=config)
    this._validate_mm_uuids = lambda *given: renderer._validate_mm_uuids(this, *given)  # noqa: SLF001
    found = renderer._process_mm_uuids(  # noqa: SLF001
        this,
        pictures,
        parse.MultiModalDataParser().parse_mm_data(pictures),
        parse.parse_mm_uuids({"image": [KEY, None]}),
        f"renderer0-mm-{request}",
    )
    return list(found["image"])


@pytest.mark.fault(107)
def test_item_without_uuid_gets_a_new_name_that_no_store_keeps_if_both_caches_are_off(
    encode: Any,
) -> None:
    encode.cache_config = copy(encode.cache_config)
    encode.cache_config.enable_prefix_caching = False
    assert names(encode, 1) == [KEY, None]

    encode.model_config.multimodal_config.mm_processor_cache_gb = 0
    first, second = names(encode, 1), names(encode, 2)

    assert [first[0], second[0]] == [KEY, KEY]
    assert first[1] != second[1]
    for name in (first[1], second[1], f"adapter:{first[1]}"):
        assert key_or_none("namespace", str(name)) is None
    assert key_or_none("namespace", KEY) is not None


def test_a_step_encodes_the_largest_item_whatever_its_limit(vllm: Any) -> None:
    """Its own limits are raised to the largest item of the model."""
    budget = importlib.import_module("vllm.v1.core.encoder_cache_manager")
    scheduler = copy(vllm.transferring("ECStoreConnector", "ec_producer").scheduler_config)
    scheduler.max_num_encoder_input_tokens = scheduler.encoder_cache_size = 100
    scheduler.disable_chunked_mm_input = False

    assert budget.compute_mm_encoder_budget(scheduler, {"image": 30, "video": 700}) == (700, 700)
    assert budget.compute_mm_encoder_budget(scheduler, {"image": 30}) == (100, 100)
