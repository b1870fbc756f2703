"""Namespace: the same in all processes of an engine, different for a different encoder."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from ec_store import open_store
from epd.routing.reports import read_namespace
from tests.ec_store.vllm_connector.steps import Connect

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 320,
}


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Path:
    """Return a copy of the model."""
    return Path(shutil.copytree(models / "tiny-qwen2.5-vl", tmp_path / "tiny"))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Return a directory without a configuration."""
    directory = tmp_path / "weights"
    directory.mkdir()
    return directory


def change(file: Path, **changes: Any) -> None:
    """Change values in a configuration file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def weights_of(folder: Path) -> dict[str, Any]:
    """Return the tensors of a model."""
    from safetensors.torch import load_file  # noqa: PLC0415 - takes seconds

    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    return tensors


def save(folder: Path, tensors: Mapping[str, Any]) -> None:
    """Replace the weights of a model."""
    from safetensors.torch import save_file  # noqa: PLC0415

    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})


def quantise(folder: Path, part: str) -> None:
    """Quantise the tensors with this part in their names, as published quantised models are."""
    import torch  # noqa: PLC0415

    tensors = weights_of(folder)
    for name in [name for name in tensors if part in name and name.endswith("proj.weight")]:
        tensors[f"{name}_scale"] = torch.ones(1)
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save(folder, tensors)
    quantization = {"quant_method": "fp8", "modules_to_not_convert": ["visual"]}
    change(folder / "config.json", quantization_config=quantization, transformers_version="99.0")
    change(folder / "config.json", text_config={"model_type": "qwen2_5_vl_text", "new_default": 1})


def paddleocr_vl() -> tuple[Any, Callable[[Any], None]]:
    from transformers import PaddleOCRVLConfig  # noqa: PLC0415

    def write(config: Any) -> None:
        text = config.text_config.to_dict()
        for key in ("model_type", "architectures", "tie_word_embeddings"):
            text.pop(key, None)
        config.update(text)

    return PaddleOCRVLConfig(architectures=["PaddleOCRVLForConditionalGeneration"]), write


def pixtral() -> tuple[Any, Callable[[Any], None]]:
    from transformers import LlavaConfig, MistralConfig, PixtralVisionConfig  # noqa: PLC0415

    def write(config: Any) -> None:
        assert config.text_config.architectures is None
        config.text_config.architectures = ["MistralForCausalLM"]

    config = LlavaConfig(
        architectures=["LlavaForConditionalGeneration"],
        text_config=MistralConfig(**TEXT),
        vision_config=PixtralVisionConfig(),
    )
    return config, write


def paligemma() -> tuple[Any, Callable[[Any], None]]:
    from transformers import Gemma2Config, PaliGemmaConfig  # noqa: PLC0415

    def write(config: Any) -> None:
        config.text_config.architectures = ["Gemma2ForCausalLM"]

    config = PaliGemmaConfig(
        architectures=["PaliGemmaForConditionalGeneration"],
        text_config=Gemma2Config(**TEXT).to_dict(),
    )
    return config, write


def qwen3_omni() -> tuple[Any, Callable[[Any], None]]:
    from transformers import Qwen3OmniMoeConfig  # noqa: PLC0415

    def write(config: Any) -> None:
        config.thinker_config.architectures = config.architectures

    return Qwen3OmniMoeConfig(architectures=["Qwen3OmniMoeForConditionalGeneration"]), write


def qwen2_5_omni() -> tuple[Any, Callable[[Any], None]]:
    from transformers import Qwen2_5OmniConfig  # noqa: PLC0415

    def write(config: Any) -> None:
        """Make the changes of a model class when the package flash_attn is installed."""
        config.thinker_config.audio_config._attn_implementation_autoset = True  # noqa: SLF001
        config.thinker_config.audio_config._attn_implementation = "flash_attention_2"  # noqa: SLF001

    return Qwen2_5OmniConfig(architectures=["Qwen2_5OmniModel"]), write


@pytest.mark.fault(70)
@pytest.mark.parametrize(
    "make", [paddleocr_vl, pixtral, paligemma, qwen3_omni, qwen2_5_omni], ids=lambda it: it.__name__
)
def test_namespace_is_the_same_before_and_after_a_model_class_writes_into_its_configuration(
    vllm: Any, tmp_path: Path, make: Callable[[], tuple[Any, Callable[[Any], None]]]
) -> None:
    """The changes are those that vLLM 0.32's model classes make in `__init__`."""
    written, write = make()
    written.save_pretrained(tmp_path)
    parsed = vllm.parsed(tmp_path)
    with vllm.model(model=str(tmp_path), hf_config=parsed):
        of_the_worker = vllm.namespace()
        before = parsed.to_dict()
        write(parsed)
        assert parsed.to_dict() != before
        assert vllm.namespace() == of_the_worker


@pytest.mark.fault(70)
def test_namespace_is_the_same_where_a_plugin_reads_the_configuration(
    vllm: Any, folder: Path, weights: Path
) -> None:
    """The connector has no file to read: vLLM parses the source again."""
    vllm.register_config_format("elsewhere", folder)
    parsed = vllm.parsed(weights, "elsewhere")
    with vllm.model(model=str(weights), config_format="elsewhere", hf_config=parsed):
        of_the_worker = vllm.namespace()
        parsed.text_config.architectures = ["Changed"]
        assert vllm.namespace() == of_the_worker
        change(folder / "config.json", tie_word_embeddings=True)
        assert vllm.namespace() != of_the_worker


def test_configuration_that_cannot_be_read_again_is_logged(
    vllm: Any, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with vllm.model(model=str(weights)):
        vllm.namespace()
    records = [one for one in caplog.records if one.name == "vllm.ec_store"]
    assert {one.levelname for one in records} == {"WARNING"}
    assert ["in memory" in one.getMessage() for one in records] == [True, False]
    assert all(str(weights) in one.getMessage() for one in records)


@pytest.fixture
def hub(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an offline cache of the hub with two commits of one model; `main` is the first."""
    repository = tmp_path / "hub" / "models--some--model"
    for commit in "ab":
        shutil.copytree(folder, repository / "snapshots" / (commit * 40))
    second = repository / "snapshots" / ("b" * 40)
    save(second, {name: one + 1 for name, one in weights_of(second).items()})
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return repository


def test_namespace_of_a_hub_model_is_made_of_its_commits_weights(
    vllm: Any, hub: Path, folder: Path
) -> None:
    """Neither a branch that moves while an engine starts nor another folder changes it."""
    first, second = (vllm.revision("main", commit * 40) for commit in "ab")
    with vllm.model(model="some/model", revision=first):
        of_the_worker = vllm.namespace()
        (hub / "refs" / "main").write_text("b" * 40)
        assert vllm.namespace() == of_the_worker
    with vllm.model(model="some/model", revision=second):
        assert vllm.namespace() != of_the_worker
    with vllm.model(model=str(folder)):
        assert vllm.namespace() == of_the_worker


def download_by(vllm: Any, monkeypatch: pytest.MonkeyPatch, download: Any) -> None:
    """Let vLLM download models by a function instead of from the hub."""
    monkeypatch.setattr(vllm.loader, "download_model", download)


def test_a_model_of_the_hub_is_downloaded_before_its_weights_are_compared(
    vllm: Any, hub: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's connector is made before vLLM downloads the weights, the scheduler's after."""
    snapshot = hub / "snapshots" / ("a" * 40)
    (snapshot / "model.safetensors").unlink()
    downloads = []

    def download(_: object, model: Any) -> None:
        downloads.append(model.model)
        shutil.copy(folder / "model.safetensors", snapshot)

    download_by(vllm, monkeypatch, download)
    with vllm.model(model="some/model", revision=vllm.revision("main", "a" * 40)):
        of_the_worker = vllm.namespace()
        assert downloads == ["some/model"]
        assert vllm.namespace() == of_the_worker
        assert downloads == ["some/model"]
    with vllm.model(model=str(folder)):
        assert vllm.namespace() == of_the_worker


def test_half_a_download_is_not_compared(
    vllm: Any, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = hub / "snapshots" / ("a" * 40)
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    downloads = []

    def download(_: object, model: Any) -> None:
        downloads.append(model.model)
        (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))

    download_by(vllm, monkeypatch, download)
    with vllm.model(model="some/model", revision=vllm.revision("main", "a" * 40)):
        whole = vllm.namespace()
        assert vllm.namespace() == whole
        assert len(downloads) == 1
        missing = {"weight_map": {**index["weight_map"], "b": "model-00002-of-00002.safetensors"}}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps(missing))
        vllm.namespace()
        assert len(downloads) == 2


def test_weights_that_cannot_be_downloaded_are_known_by_name(
    vllm: Any, hub: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In this case vLLM fails or loads them from elsewhere; the connector must not raise."""
    (hub / "snapshots" / ("a" * 40) / "model.safetensors").unlink()

    def download(*_: object) -> None:
        raise OSError("no network")

    download_by(vllm, monkeypatch, download)
    with vllm.model(model="some/model", revision=vllm.revision("main", "a" * 40)):
        assert vllm.namespace() == vllm.namespace()
    assert any("no network" in one.getMessage() for one in caplog.records)


@pytest.mark.security("S17")
def test_models_share_a_namespace_only_where_their_configuration_is_the_same(
    vllm: Any, folder: Path
) -> None:
    derived = vllm.namespace()
    with vllm.model(quantization="fp8"):
        assert vllm.namespace() != derived
    with vllm.model(hf_overrides={"vision_config": {"depth": 1}}):
        assert vllm.namespace() != derived
    with vllm.model(model=str(folder)):
        assert vllm.namespace() == derived
        change(folder / "config.json", image_token_id=7)
        assert vllm.namespace() != derived


def test_namespace_does_not_depend_on_the_path_of_the_weights(vllm: Any, folder: Path) -> None:
    derived = vllm.namespace()
    moved = folder.rename(folder.with_name("current"))
    for file in moved.iterdir():
        os.utime(file, (0, 0))
    with vllm.model(model=f"{moved}/", revision="v2"):
        assert vllm.namespace() == derived


def test_weights_in_several_files_have_the_namespace_of_one(vllm: Any, folder: Path) -> None:
    derived = vllm.namespace()
    tensors = list(weights_of(folder).items())
    for number in range(3):
        save(folder, dict(tensors[number::3]))
        (folder / "model.safetensors").rename(folder / f"model-{number}.safetensors")
    with vllm.model(model=str(folder)):
        assert vllm.namespace() == derived


@pytest.mark.security("S17")
def test_an_encoder_retrained_in_place_has_another_namespace(vllm: Any, folder: Path) -> None:
    """One tensor in the middle changes; its size and the files' names and times stay."""
    derived = vllm.namespace()
    file = folder / "model.safetensors"
    before = file.stat()
    name = "model.visual.blocks.1.attn.qkv.weight"
    tensors = weights_of(folder)
    save(folder, {**tensors, name: tensors[name] + 1})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with vllm.model(model=str(folder)):
        assert file.stat().st_size == before.st_size
        assert vllm.namespace() != derived


def test_retraining_only_the_language_model_keeps_the_namespace(vllm: Any, folder: Path) -> None:
    derived = vllm.namespace()
    tensors = weights_of(folder)
    trained = {name: one + ("layers" in name) for name, one in tensors.items()}
    assert any((trained[name] != tensors[name]).any() for name in tensors)
    save(folder, {name: trained[name] if "language" in name else tensors[name] for name in tensors})
    with vllm.model(model=str(folder)):
        assert vllm.namespace() == derived


def test_a_quantised_language_model_shares_with_an_unquantised_encoder(
    vllm: Any, folder: Path
) -> None:
    derived = vllm.namespace()
    quantise(folder, "language_model")
    with vllm.model(model=str(folder), quantization="fp8"):
        assert vllm.namespace() == derived


def test_a_quantised_encoder_does_not_share_with_an_unquantised_one(
    vllm: Any, folder: Path
) -> None:
    derived = vllm.namespace()
    quantise(folder, "visual")
    with vllm.model(model=str(folder), quantization="fp8"):
        quantised = vllm.namespace()
        assert quantised != derived
        change(folder / "config.json", quantization_config={"activation_scheme": "static"})
        assert vllm.namespace() != quantised


def test_quantisation_while_the_weights_are_loaded_changes_the_namespace(
    vllm: Any, folder: Path
) -> None:
    """It may affect the encoder, although the checkpoint is not quantised."""
    quantise(folder, "language_model")
    with vllm.model(model=str(folder), quantization="fp8"):
        derived = vllm.namespace()
        with vllm.model(quantization_config={"linear": "fp8_per_tensor"}):
            assert vllm.namespace() != derived


def test_quantisation_in_a_separate_file_is_read(vllm: Any, folder: Path) -> None:
    with vllm.model(model=str(folder), quantization="modelopt"):
        online = vllm.namespace()
        (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
        stored = vllm.namespace()
    assert stored == vllm.namespace() != online


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "runai_streamer", "a_plugins"])
def test_weights_are_compared_with_any_load_format(
    vllm: Any, folder: Path, load_format: str
) -> None:
    with vllm.model(model=str(folder)), vllm.loading(load_format=load_format):
        derived = vllm.namespace()
        save(folder, {name: one + 1 for name, one in weights_of(folder).items()})
        assert vllm.namespace() != derived


@pytest.mark.parametrize(
    ("load_format", "file"), [("auto", "pytorch_model.bin"), ("npcache", "m.bin"), ("pt", "m.pt")]
)
def test_weights_that_are_not_in_safetensors_are_compared_whole(
    vllm: Any, folder: Path, load_format: str, file: str
) -> None:
    import torch  # noqa: PLC0415

    tensors = weights_of(folder)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / file)
    with vllm.model(model=str(folder)), vllm.loading(load_format=load_format):
        derived = vllm.namespace()
        torch.save(tensors, folder / file)
        assert vllm.namespace() == derived
        torch.save({**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1}, folder / file)
        assert vllm.namespace() != derived


def test_a_gguf_is_compared_with_the_encoder_beside_it(vllm: Any, folder: Path) -> None:
    model, encoder = folder / "model-Q4.gguf", folder / "mmproj-BF16.gguf"
    model.write_bytes(b"GGUF" * 1000)
    encoder.write_bytes(b"GGUF" * 100)
    with vllm.model(model=str(model), hf_config_path=str(folder)):
        derived = vllm.namespace()
        encoder.write_bytes(b"GGUE" * 100)
        assert vllm.namespace() != derived


def test_random_weights_share_nothing_with_real_ones(vllm: Any, folder: Path) -> None:
    derived = vllm.namespace()
    with vllm.loading(load_format="dummy"):
        random = vllm.namespace()
        with vllm.model(model=str(folder)):
            assert vllm.namespace() == random
            change(folder / "config.json", text_config={"hidden_size": 512})
            assert vllm.namespace() != random
    assert random != derived


def test_weights_in_object_storage_are_known_by_their_name(
    vllm: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From there vLLM fetches only the configuration, into a separate folder."""
    (folder / "model.safetensors").unlink()

    def namespace(uri: str) -> str:
        with (
            vllm.model(model=str(folder), model_weights=uri),
            vllm.loading(load_format="runai_streamer"),
        ):
            derived: str = vllm.namespace()
            return derived

    assert namespace("s3://bucket/a") != namespace("s3://bucket/b")
    assert namespace("s3://bucket/a") == namespace("s3://bucket/a")
    record = caplog.records[-1]
    assert (record.levelname, "generation" in record.getMessage()) == ("WARNING", True)


def test_namespace_contains_the_generation(vllm: Any) -> None:
    first, second = vllm.namespace(), vllm.namespace(1)
    assert first.startswith("qwen2_5_vl@0:")
    assert second == first.replace("@0:", "@1:")


def test_namespace_is_on_the_engines_metrics_where_proxies_read_it(vllm: Any) -> None:
    assert read_namespace(vllm.page()) == vllm.namespace()
    assert read_namespace(vllm.page(generation=3)) == vllm.namespace(3)


def test_generation_is_an_option_of_the_connector(vllm: Any, connect: Connect) -> None:
    assert connect(generation=3).namespace == vllm.namespace(3)
    with pytest.raises(ValueError, match="generation"):
        connect(generation=-1)


def test_processor_files_change_the_namespace(vllm: Any, folder: Path) -> None:
    with vllm.model(model=str(folder)):
        derived = vllm.namespace()
        (folder / "preprocessor_config.json").write_text('{"max_pixels": 100}')
        another = vllm.namespace()
        assert another != derived
        change(folder / "preprocessor_config.json", transformers_version="99.0")
        assert vllm.namespace() == another


def test_mistral_format_is_read_from_its_own_file(vllm: Any, folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "params.json").write_text('{"dim": 64}')
    with vllm.model(model=str(folder)):
        first = vllm.namespace()
        change(folder / "params.json", dim=128)
        assert vllm.namespace() != first


def override(config: Any) -> Any:
    return config


def another_override(config: Any) -> Any:
    return config


def test_namespace_depends_on_the_name_of_an_overriding_function(vllm: Any) -> None:
    def namespace(function: object) -> str:
        with vllm.model(hf_overrides=function):
            derived: str = vllm.namespace()
            return derived

    assert namespace(override) != namespace(another_override)
    copied = FunctionType(override.__code__, override.__globals__, override.__name__)
    assert copied is not override
    assert namespace(copied) == namespace(override)


@pytest.mark.security("S17")
def test_encoders_that_compute_otherwise_share_nothing(vllm: Any) -> None:
    derived = vllm.namespace()
    with vllm.encoder(mm_encoder_attn_dtype="fp8"):
        assert vllm.namespace() != derived
    with vllm.encoder(mm_processor_kwargs={"max_pixels": 100}):
        assert vllm.namespace() != derived
    with vllm.encoder(media_io_kwargs={"video": {"num_frames": 4}}):
        assert vllm.namespace() != derived
    assert vllm.namespace() == derived


def test_the_namespace_does_not_depend_on_the_processors_device(vllm: Any) -> None:
    """On encode instances with an accelerator, vLLM sets it by itself."""
    derived = vllm.namespace()
    with vllm.encoder(mm_processor_kwargs={"device": "cuda"}):
        assert vllm.namespace() == derived


def test_an_upgrade_of_transformers_keeps_the_namespace(vllm: Any, folder: Path) -> None:
    with vllm.model(model=str(folder), hf_config=vllm.parsed(folder)):
        derived = vllm.namespace()
    upgraded = vllm.parsed(folder)
    upgraded.a_new_default = 1
    upgraded.transformers_version = "99.0"
    with vllm.model(model=str(folder), hf_config=upgraded):
        assert vllm.namespace() == derived


def test_releases_share_entries_only_where_their_layout_was_compared(vllm: Any) -> None:
    layouts = {
        version: vllm.layout(version)
        for version in ("0.32.0", "0.32.1+cpu", "99.1.0", "99.1.2", "99.2.0", "dev")
    }
    assert layouts["0.32.0"] == layouts["0.32.1+cpu"]
    assert layouts["99.1.0"] == layouts["99.1.2"]
    assert len(set(layouts.values())) == 4


@pytest.mark.fault(70)
def test_two_namespaces_in_one_engine_are_an_error_and_nothing_is_named(
    vllm: Any, connect: Connect, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker reports its namespace at the end of a step, even if it has written nothing."""
    connector = connect()
    caplog.clear()
    request = vllm.request(vllm.feature("a"))
    with open_store(url) as store:
        agreeing = vllm.saver(connector, store)
        agreeing.send_reports()
        assert set(connector.request_finished(request)[1]) == {"a"}
        assert not [one for one in caplog.records if one.levelname != "INFO"]
        for _ in range(2):
            saver = vllm.saver(connector, store, namespace="tiny@main:another")
            saver.send_reports()
            connector.get_ec_connector_stats()
            saver.close()
        agreeing.close()

    [record] = [one for one in caplog.records if one.levelname == "ERROR"]
    assert "tiny@main:another" in record.getMessage()
    assert connector.namespace in record.getMessage()
    assert connector.request_finished(request) == (False, None)
