"""Entries that do not fit the model, or contain values that are not finite, are misses."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ec_store import EntryKey, open_store
from tests.ec_store.vllm_connector.steps import Connect, Step, counted, put, settle

ROWS, COLUMNS = 4, 256
"""Shape that the tiny model expects for `Pieces.feature`."""

MISFITS = {
    "wider": torch.ones(ROWS, COLUMNS + 8),
    "by-one": torch.ones(ROWS, COLUMNS + 1),
    "narrower": torch.ones(ROWS, COLUMNS // 2),
    "longer": torch.ones(ROWS + 1, COLUMNS),
    "shorter": torch.ones(ROWS - 1, COLUMNS),
    "empty": torch.ones(0, COLUMNS),
    "no-columns": torch.ones(ROWS, 0),
    "dtype": torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16),
    "flat": torch.ones(ROWS * COLUMNS),
    "deep": torch.ones(1, ROWS, COLUMNS),
    "scalar": torch.ones(()),
}


@pytest.mark.fault(20)
@pytest.mark.fault(69)
@pytest.mark.security("S16")
@pytest.mark.parametrize("media", [True, False], ids=["media", "metadata"])
@pytest.mark.parametrize("tensor", MISFITS.values(), ids=MISFITS)
def test_an_entry_that_does_not_fit_is_a_miss(
    vllm: Any, connect: Connect, url: str, tensor: torch.Tensor, media: bool
) -> None:
    connector = connect()
    put(connector, url, "a", vllm.stored(tensor))
    request = vllm.request(vllm.feature("a", media=media))

    assert settle(connector, request) == (set() if media else {"r"})
    assert not connector.has_cache_item("a")
    connector.update_state_after_alloc(request, 0)
    assert connector.build_connector_meta(Step(request)).loads == {}
    assert counted(connector)["misfits"] == 1


@pytest.mark.fault(69)
def test_a_misfit_is_logged_once_for_each_kind(
    vllm: Any, connect: Connect, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    connector = connect()
    for number, tensor in enumerate([*MISFITS.values(), *MISFITS.values()]):
        put(connector, url, f"item-{number}", vllm.stored(tensor))
        request = vllm.request(vllm.feature(f"item-{number}"))
        settle(connector, request)
        connector.request_finished(request)

    said = [one.getMessage() for one in caplog.records if "does not fit" in one.getMessage()]
    assert len(said) == 4
    assert f"columns: found {COLUMNS + 8}, expected {COLUMNS}" in said[0]
    assert f"rows: found {ROWS + 1}, expected {ROWS}" in said[1]
    assert "dtype: found BF16, expected F32" in said[2]
    assert "dimensions: found 1, expected 2" in said[3]
    assert counted(connector)["misfits"] == 2 * len(MISFITS)


@pytest.mark.fault(69)
def test_a_misfit_replaced_in_the_store_is_a_hit(vllm: Any, connect: Connect, url: str) -> None:
    connector = connect()
    put(connector, url, "a", vllm.stored(MISFITS["wider"]))
    request = vllm.request(vllm.feature("a"))
    settle(connector, request)
    connector.request_finished(request)
    with open_store(url) as store:
        assert store.delete([EntryKey(connector.namespace, "a")]) == 1
    put(connector, url, "a", vllm.entry())

    assert settle(connector, vllm.request(vllm.feature("a", media=False))) == set()
    assert connector.has_cache_item("a")


def qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig  # noqa: PLC0415

    return Qwen3VLConfig()


def qwen3_omni() -> Any:
    from transformers import Qwen3OmniMoeConfig  # noqa: PLC0415

    return Qwen3OmniMoeConfig()


def test_widths_follow_from_the_configuration(vllm: Any) -> None:
    plain = vllm.widths()
    assert [plain.known_columns(one) for one in ("image", "video", "audio")] == [COLUMNS] * 3
    assert plain.known_columns("another") is None


@pytest.mark.parametrize("make", [qwen3_vl, qwen3_omni], ids=lambda make: make.__name__)
def test_deepstack_levels_widen_pictures_and_videos(vllm: Any, make: Any) -> None:
    config = make()
    vision = getattr(config, "thinker_config", config).vision_config
    levels = len(vision.deepstack_visual_indexes)
    assert levels == 3
    with vllm.model(hf_config=config):
        widths = vllm.widths()
    assert [widths.known_columns(one) for one in ("image", "video", "audio")] == [
        (1 + levels) * COLUMNS,
        (1 + levels) * COLUMNS,
        COLUMNS,
    ]


def test_video_pruning_appends_columns_of_positions(vllm: Any) -> None:
    with vllm.encoder(video_pruning_rate=0.5):
        widths = vllm.widths()
        assert [widths.known_columns(one) for one in ("image", "video")] == [COLUMNS + 4] * 2
        assert widths.known_columns("audio") == COLUMNS
        with vllm.model(hf_config=qwen3_vl()):
            assert vllm.widths().known_columns("video") == 4 * COLUMNS + 5
        with vllm.model(hf_config=qwen3_omni()):  # the number of columns is not known
            assert vllm.widths().known_columns("video") is None


def test_width_is_unknown_without_it_in_the_configuration(vllm: Any) -> None:
    config = qwen3_vl()
    config.deepstack_layer_map = [[-1, 0], [-2, 1]]
    with vllm.model(hf_config=config):
        assert vllm.widths().known_columns("image") is None


def test_widths_are_stated_before_measured_before_learned_before_derived(vllm: Any) -> None:
    widths = vllm.widths({"image": 1}, {"image": 2, "video": 3})
    assert [widths.known_columns(one) for one in ("image", "video", "audio")] == [1, 3, COLUMNS]
    assert [widths.is_derived(one) for one in ("image", "video", "audio")] == [False, False, True]
    for modality in ("image", "video", "audio"):
        widths.learn_columns(modality, 4)
        widths.learn_columns(modality, 5)
    assert [widths.known_columns(one) for one in ("image", "video", "audio")] == [1, 3, 4]
    assert not widths.is_derived("audio")


@pytest.mark.parametrize("widths", [{"image": 0}, {"image": -1}, {"image": "wide"}, 7], ids=str)
def test_stated_widths_that_are_not_positive_are_refused(connect: Connect, widths: object) -> None:
    with pytest.raises(ValueError, match="encoder_output_widths"):
        connect(encoder_output_widths=widths)


@pytest.mark.fault(69)
def test_width_is_learned_from_outputs_of_the_engine(
    vllm: Any, connect: Connect, url: str, models: Path
) -> None:
    """The model's configuration does not contain the width of its encoder outputs."""
    wide = torch.ones(ROWS, 2 * COLUMNS)
    config = vllm.parsed(models / "tiny-qwen2.5-vl")
    config.deepstack_layer_map = [[-1, 0], [-2, 1]]
    with vllm.model(hf_config=config):
        connector = connect()
    put(connector, url, "a", vllm.stored(wide))
    assert settle(connector, vllm.request(vllm.feature("a", media=False))) == {"r"}
    local = vllm.request(vllm.feature("a"))
    local.request_id = "local"
    assert settle(connector, local) == set()
    step = connector.build_connector_meta(Step(local))
    assert step.learn == {"a": "image"}

    learner = vllm.learner()
    cache: dict[str, Any] = {}
    learner.expect_items(step.learn, cache)
    learner.send_reports()
    cache["a"] = wide
    learner.send_reports()
    learner.close()
    counted(connector)
    connector.request_finished(local)

    later = vllm.request(vllm.feature("a", media=False))
    later.request_id = "later"
    assert settle(connector, later) == set()
    assert connector.has_cache_item("a")
    other = vllm.request(vllm.feature("b"))
    other.request_id = "other"
    settle(connector, other)
    assert connector.build_connector_meta(Step(other)).learn == {}


def test_a_model_without_media_has_no_widths(vllm: Any) -> None:
    with vllm.model(multimodal_config=None):
        assert vllm.widths().known_columns("image") == COLUMNS


def test_learner_reports_one_width_per_modality(vllm: Any, connect: Connect) -> None:
    connector = connect()
    learner = vllm.learner()
    pictures = {f"picture-{number}": "image" for number in range(9)}
    cache = {"picture-3": torch.ones(2, 7), "sound": torch.ones(2, 5)}
    learner.expect_items({**pictures, "sound": "audio"}, cache)
    learner.send_reports()
    learner.send_reports()
    cache["picture-4"] = torch.ones(2, 9)
    learner.send_reports()
    learner.close()

    told = [message["widths"] for message in connector._receiver.drain()]  # noqa: SLF001
    assert told == [{"image": 7, "audio": 5}]


def test_learner_reports_a_width_again_if_the_scheduler_missed_it(
    vllm: Any, connect: Connect
) -> None:
    """Workers start before their scheduler."""
    connector = connect()
    learner = vllm.learner()
    connector.shutdown()
    learner.expect_items({"a": "image"}, {"a": torch.ones(2, 7)})
    learner.send_reports()
    receiver = vllm.receiver()
    learner.send_reports()
    learner.close()

    assert [message["widths"] for message in receiver.drain()] == [{"image": 7}]
    receiver.close()


@pytest.mark.fault(69)
def test_a_stated_width_is_taken(vllm: Any, connect: Connect, url: str) -> None:
    connector = connect(encoder_output_widths={"image": COLUMNS + 8})
    put(connector, url, "a", vllm.stored(MISFITS["wider"]))
    assert settle(connector, vllm.request(vllm.feature("a", media=False))) == set()
    assert connector.has_cache_item("a")


@pytest.mark.fault(69)
@pytest.mark.parametrize("media", [True, False], ids=["media", "metadata"])
def test_an_entry_that_is_not_finite_is_a_miss(
    vllm: Any, connect: Connect, url: str, caplog: pytest.LogCaptureFixture, media: bool
) -> None:
    connector = connect()
    for name, value in (("a", math.nan), ("b", -math.inf)):
        spoiled = vllm.tensor()
        spoiled[2, 7] = value
        put(connector, url, name, vllm.stored(spoiled))
        request = vllm.request(vllm.feature(name, media=media))
        assert settle(connector, request) == (set() if media else {"r"})
        connector.request_finished(request)
        assert not connector.has_cache_item(name)
    figures = counted(connector)
    assert (figures["nonfinite"], figures["misses"]) == (2, 2)
    assert len([one for one in caplog.records if "NaN" in one.getMessage()]) == 1


@pytest.mark.fault(69)
def test_an_encoder_output_that_is_not_finite_is_not_stored_and_not_named(
    vllm: Any, connect: Connect, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    connector = connect()
    request = vllm.request(vllm.feature("a"), vllm.feature("b", offset=10))
    step = connector.build_connector_meta(Step(request))
    spoiled = vllm.tensor()
    spoiled[0, 0] = math.nan
    with open_store(url) as store:
        saver = vllm.saver(connector, store)
        saver.expect_items(step.items, {})
        saver.save("a", spoiled)
        saver.save("b", vllm.tensor())
        saver.close()
        assert store.lookup([EntryKey(connector.namespace, "a")]) == [None]
    assert set(connector.request_finished(request)[1]) == {"b"}
    figures = counted(connector)
    assert (figures["nonfinite"], figures["drops"], figures["saves"]) == (1, 1, 1)
    assert len([one for one in caplog.records if "NaN" in one.getMessage()]) == 1


@pytest.mark.fault(69)
def test_a_device_that_fails_while_entries_are_loaded_raises_nothing(
    vllm: Any, connect: Connect, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = connect()
    put(connector, url, "a", vllm.entry())
    request = vllm.request(vllm.feature("a", media=False))
    settle(connector, request)
    connector.update_state_after_alloc(request, 0)
    worker = vllm.worker(monkeypatch)
    worker.bind_connector_metadata(connector.build_connector_meta(Step(request)))

    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("torch.empty", no_memory)
    cache: dict[str, Any] = {}
    worker.start_load_caches(cache)
    assert cache == {}
    assert worker.counts["exceptions"] == 1
    worker.shutdown()
