"""Keys of encoder outputs, as engines report them."""

from typing import Any

import pytest

from epd.encoder_cache.identity import Identifiers, OutputKey


def of(uuid: str, model: str | None = "adapter", **more: Any) -> OutputKey:
    return OutputKey(model, uuid, named=True, kwargs=b"")._replace(**more)


def test_a_named_item_is_found_under_its_own_key() -> None:
    assert Identifiers().identifier_of(of("a")) == "a"


@pytest.mark.parametrize("more", [{"named": False}, {"kwargs": b"{}"}])
def test_identifiers_of_other_outputs_are_learned_from_engines(more: dict[str, Any]) -> None:
    identifiers = Identifiers()
    assert identifiers.identifier_of(of("a", **more)) is None

    identifiers.learn_identifier(of("a", **more), "hash")
    identifiers.learn_identifier(of("b"), "adapter:b")
    assert identifiers.identifier_of(of("a", **more)) == "hash"
    assert identifiers.identifier_of(of("c", **more)) is None


def test_the_prefix_of_an_adapter_is_learned_from_one_answer() -> None:
    """The engine adds the adapter's name to the key if the adapter changes the encoder."""
    identifiers = Identifiers()
    identifiers.learn_identifier(of("a"), "adapter:a")

    assert identifiers.identifier_of(of("b")) == "adapter:b"
    assert identifiers.identifier_of(of("b", model="base")) == "b"


def test_an_identifier_without_the_uuid_is_kept_only_for_its_item() -> None:
    identifiers = Identifiers()
    identifiers.learn_identifier(of("a"), "hash")

    assert [identifiers.identifier_of(of(uuid)) for uuid in "ab"] == ["hash", "b"]
    identifiers.learn_identifier(of("a"), "adapter:a")
    assert [identifiers.identifier_of(of(uuid)) for uuid in "ab"] == ["adapter:a", "adapter:b"]


def test_an_adapter_that_has_no_prefix_any_more_is_learned_too() -> None:
    identifiers = Identifiers()
    identifiers.learn_identifier(of("a"), "adapter:a")
    identifiers.learn_identifier(of("b"), "b")

    assert [identifiers.identifier_of(of(uuid)) for uuid in "abc"] == ["a", "b", "c"]
