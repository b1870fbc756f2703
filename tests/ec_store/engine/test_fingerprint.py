"""Fingerprint of weights: it differs for different encoder weights, at a bounded cost."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_store.engine.fingerprint import (
    MANY_TENSORS,
    MAX_STEPS,
    TAIL_BYTES,
    encoder_names,
    fingerprint,
)

ENCODER = {f"model.visual.blocks.{n}.mlp.up_proj.weight": bytes([n]) * 40_000 for n in range(5)}
REST = {
    "model.visual.merger.ln_q.weight": b"q" * 64,
    "multi_modal_projector.linear_1.weight": b"p" * 64,
    "model.visual.deepstack_merger_list.0.norm.weight": b"d" * 64,
}
EMBEDDINGS = {"model.language_model.embed_tokens.weight": b"e" * 20_000}
LANGUAGE = {
    "lm_head.weight": b"h" * 64,
    "model.language_model.layers.0.mlp.up_proj.weight": b"l" * 20_000,
    "model.language_model.norm.weight": b"n" * 64,
}
MODEL = ENCODER | REST | EMBEDDINGS | LANGUAGE


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the size in bytes of each following read is appended."""
    sizes: list[int] = []
    pread = os.pread

    def counted(file: int, size: int, offset: int) -> bytes:
        content = pread(file, size, offset)
        sizes.append(len(content))
        return content

    monkeypatch.setattr(os, "pread", counted)
    return sizes


def write(file: Path, tensors: Mapping[str, bytes], dtype: str = "U8") -> Path:
    """Write a safetensors file."""
    header, end = {}, 0
    for name, content in tensors.items():
        begin, end = end, end + len(content)
        header[name] = {"dtype": dtype, "shape": [len(content)], "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(tensors.values()))
    return file


def sparse(file: Path, sizes: Mapping[str, int]) -> Path:
    """Write a sparse safetensors file with tensors of zeros."""
    header, end = {}, 0
    for name, size in sizes.items():
        begin, end = end, end + size
        header[name] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    os.truncate(file, 8 + len(encoded) + end)
    return file


def test_names_and_number_of_files_do_not_matter(tmp_path: Path) -> None:
    whole = fingerprint([write(tmp_path / "model.safetensors", MODEL)])
    items = list(MODEL.items())
    first = write(tmp_path / "b.safetensors", dict(items[::2]))
    second = write(tmp_path / "a.safetensors", dict(reversed(items[1::2])))

    assert fingerprint([first, second]).digest == whole.digest
    assert fingerprint([second, first]).digest == whole.digest
    assert (whole.apart, whole.plain) == (True, False)


@pytest.mark.parametrize("name", [*ENCODER, *REST, *EMBEDDINGS])
def test_one_retrained_tensor_of_the_encoder_changes_the_fingerprint(
    tmp_path: Path, name: str
) -> None:
    before = fingerprint([write(tmp_path / "a.safetensors", MODEL)])
    retrained = MODEL | {name: bytes(255 - byte for byte in MODEL[name])}

    after = fingerprint([write(tmp_path / "a.safetensors", retrained)])
    assert after.digest != before.digest


@pytest.mark.parametrize("place", [0, 20_000, 39_999])
def test_each_sample_of_a_tensor_counts(tmp_path: Path, place: int) -> None:
    before = fingerprint([write(tmp_path / "a.safetensors", MODEL)])
    [name, content] = next(iter(ENCODER.items()))
    changed = bytearray(content)
    changed[place] ^= 1

    after = fingerprint([write(tmp_path / "a.safetensors", MODEL | {name: bytes(changed)})])
    assert after.digest != before.digest


def test_the_language_model_does_not_matter(tmp_path: Path) -> None:
    before = fingerprint([write(tmp_path / "a.safetensors", MODEL)])
    quantised = {name: content for name, content in MODEL.items() if name not in LANGUAGE}
    quantised["model.language_model.layers.0.mlp.up_proj.qweight"] = b"4bit"

    after = fingerprint([write(tmp_path / "a.safetensors", quantised)])
    assert after.digest == before.digest


def test_fingerprint_reports_a_quantised_encoder(tmp_path: Path) -> None:
    plain, quantised = (
        fingerprint([write(tmp_path / "a.safetensors", ENCODER | LANGUAGE, dtype)])
        for dtype in ("BF16", "F8_E4M3")
    )

    assert (plain.plain, quantised.plain) == (True, False)
    assert plain.digest != quantised.digest


@pytest.mark.parametrize(
    "name",
    [
        "visual.blocks.0.attn.qkv.weight",
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
        "vision_model.encoder.layers.0.mlp.fc1.weight",
        "model.vision_tower.layers.0.weight",
        "multi_modal_projector.linear_1.weight",
        "mlp1.0.weight",
        "audio_tower.layers.0.fc1.weight",
        "thinker.visual.blocks.0.norm.weight",
        "thinker.audio_tower.layers.0.norm.weight",
        "language_projection.weight",
        "model.encoder.layers.0.norm.weight",
        "vpm.encoder.layers.0.norm.weight",
        "resampler.proj",
        "image_newline",
        "encoder.layers.0.norm.weight",
        "vision_encoder.transformer.layers.0.norm.weight",
        "model.visual_tokenizer.weight",
        "model.embed_vision.embedding.weight",
        "language_model.model.embed_tokens.weight",
    ],
)
def test_tensors_of_encoders_are_kept(name: str) -> None:
    assert name in encoder_names([name, "visual.a", "model.layers.0.weight"])


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
        "language_model.model.layers.0.mlp.up_proj.weight",
        "language_model.lm_head.weight",
        "model.language_model.layers.0.mlp.up_proj.weight",
        "thinker.model.layers.0.mlp.up_proj.weight",
        "thinker.lm_head.weight",
        "talker.model.layers.0.weight",
        "token2wav.dit.weight",
        "llm.model.layers.0.weight",
        "language.model.layers.0.weight",
    ],
)
def test_tensors_of_language_models_are_left_out(name: str) -> None:
    assert name not in encoder_names([name, "visual.a"])


def test_layers_of_mistrals_format_are_ignored_only_in_it() -> None:
    names = {"layers.0.attention.wq.weight", "vision_encoder.patch_conv.weight"}

    assert encoder_names(names) == names
    embeddings = "tok_embeddings.weight"
    kept = {"vision_encoder.patch_conv.weight", embeddings}
    assert encoder_names({*names, embeddings}) == kept


def test_fingerprint_covers_the_whole_checkpoint_without_a_known_encoder(tmp_path: Path) -> None:
    text = LANGUAGE | EMBEDDINGS
    before = fingerprint([write(tmp_path / "a.safetensors", text)])
    retrained = text | {"lm_head.weight": b"x" * 64}

    after = fingerprint([write(tmp_path / "a.safetensors", retrained)])
    assert (before.apart, after.digest != before.digest) == (False, True)


def test_reads_of_a_large_checkpoint_are_bounded(tmp_path: Path, reads: list[int]) -> None:
    """The encoder has 500 tensors of 4 MiB; the language models have 20 GB and 40 GB."""
    encoder = {f"visual.blocks.{n}.weight": 4 * 1024**2 for n in range(500)}

    def read(layers: int) -> tuple[str, int, int]:
        language = {f"model.layers.{n}.mlp.weight": 256 * 1024**2 for n in range(layers)}
        reads.clear()
        file = sparse(tmp_path / "model.safetensors", encoder | language)
        return fingerprint([file]).digest, len(reads), sum(reads)

    small, small_reads, small_bytes = read(80)
    large, large_reads, large_bytes = read(160)
    assert large == small
    assert large_reads == small_reads == 2 + 3 * 500
    assert small_bytes < 500 * 3 * 4096 + 64 * 1024
    assert large_bytes - small_bytes < 80 * 128


def test_one_sample_of_each_of_very_many_tensors_is_read(tmp_path: Path, reads: list[int]) -> None:
    def counted(tensors: int) -> int:
        sizes = {f"experts.{n}.weight": 64 * 1024 for n in range(tensors)}
        reads.clear()
        fingerprint([sparse(tmp_path / "a.safetensors", sizes)])
        return len(reads) - 2

    assert counted(MANY_TENSORS) == 3 * MANY_TENSORS
    assert counted(MANY_TENSORS + 1) == MANY_TENSORS + 1


def test_one_changed_tensor_of_a_pickled_checkpoint_is_noticed(
    tmp_path: Path, reads: list[int]
) -> None:
    """The tensor lies between two samples; its checksum is in the archive's directory."""
    torch = pytest.importorskip("torch")  # takes seconds

    def written(fill: float) -> Any:
        tensors = {f"visual.{n}": torch.zeros(1000) for n in range(2000)}
        tensors["visual.77"] += fill
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        return fingerprint([tmp_path / "pytorch_model.bin"])

    first = written(0.0)
    read_bytes = sum(reads)
    second, again = written(1.0), written(0.0)
    assert first.digest == again.digest != second.digest
    assert (first.apart, first.plain) == (False, False)
    assert 0 < read_bytes < 2 * TAIL_BYTES


@pytest.mark.parametrize("size", [0, 1, 1024**2, 3 * 1024**2, 50 * 1024**2])
def test_files_of_any_size_have_a_fingerprint(tmp_path: Path, reads: list[int], size: int) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    os.truncate(file, size)
    before = fingerprint([file])
    read_bytes = sum(reads)
    with file.open("ab") as more:
        more.write(b"x")

    assert fingerprint([file]).digest != before.digest
    assert read_bytes <= 2 * TAIL_BYTES


def test_samples_of_a_huge_file_are_bounded(tmp_path: Path, reads: list[int]) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    os.truncate(file, 140 * 10**9)

    fingerprint([file])
    assert 0 < len(reads) <= MAX_STEPS + 2


@given(content=st.binary(max_size=200), length=st.integers(0, 2**64 - 1) | st.integers(0, 200))
def test_a_damaged_header_is_a_value_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, length: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + content)
    try:
        found = fingerprint([file])
    except ValueError as error:
        assert str(file) in str(error)
    else:
        assert json.loads(content[:length]) == {}
        assert not found.apart


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"dtype": "BF16", "shape": [1], "data_offsets": [0, 100]},
        {"dtype": "BF16", "shape": [1], "data_offsets": [4, 2]},
        {"dtype": "BF16", "shape": [1], "data_offsets": [-1, 2]},
        {"dtype": 1, "shape": [1], "data_offsets": [0, 2]},
        {"dtype": "BF16", "shape": 1, "data_offsets": [0, 2]},
        {"dtype": "BF16", "shape": [1], "data_offsets": ["0", 2]},
        [],
    ],
)
def test_a_tensor_outside_its_file_is_a_value_error(tmp_path: Path, entry: Any) -> None:
    encoded = json.dumps({"visual.a": entry}).encode()
    file = tmp_path / "a.safetensors"
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(2))

    with pytest.raises(ValueError, match=r"a\.safetensors"):
        fingerprint([file])
