"""vLLM's cache of preprocessed media in an engine, beside items that come as metadata."""

from typing import Any

import pytest

from tests.ec_store.vllm_connector.steps import Connect


@pytest.mark.fault(132)
def test_metadata_of_an_item_do_not_replace_its_media(vllm: Any, connect: Connect) -> None:
    connect()
    cache = vllm.media_cache()
    media, metadata = (vllm.feature("a", media=media).data for media in (True, False))

    assert cache.get_and_update_item(media, "a") is media
    assert cache.get_and_update_item(metadata, "a") is metadata
    assert cache.get_and_update_item(None, "a") is media  # vLLM's frontend sends media once


@pytest.mark.usefixtures("vllm")
def test_a_release_without_that_cache_is_served_with_a_warning(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr("vllm.multimodal.cache.LruKeyReplicatedReceiverCache")
    connect()

    assert "release of vLLM is not known here" in caplog.text
