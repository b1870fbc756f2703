"""Keys of media, of conversations, and of encoder outputs as engines report them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.encoder_cache.identity import (
    Identifiers,
    OutputKey,
    content_key,
    conversation_key,
    name_key,
    with_salt,
)
from epd.errors import BadRequest
from epd.media.parts import FRAMES, Inline
from epd.tenants import ANONYMOUS, Scope, Tenant

ALICE, BOB = Scope(Tenant("alice")), Scope(Tenant("bob"))
CAT = Inline("image/png", b"YWJj")

words = st.text(max_size=20)
media = st.builds(Inline, words | st.just(FRAMES), words.map(str.encode))
scopes = st.builds(
    Scope, st.none() | st.builds(Tenant, words), st.sampled_from([b"", b"s1", b"s2"])
)
contents = st.tuples(scopes, words | st.sampled_from(["video", "image"]), media)
aliases = st.tuples(scopes, words, words)


@pytest.mark.security("S11")
@given(contents, contents)
def test_content_keys_are_equal_exactly_where_all_they_cover_is(
    one: tuple[Scope, str, Inline], other: tuple[Scope, str, Inline]
) -> None:
    def covered(scope: Scope, modality: str, media: Inline) -> tuple[object, ...]:
        frames = modality == "video" and media.media_type == FRAMES
        return scope, modality, frames, media.base64

    assert (covered(*one) == covered(*other)) == (content_key(*one) == content_key(*other))


@pytest.mark.parametrize("modality", ["image", "audio", "video"])
def test_guessed_media_types_share_a_key_unless_a_video_is_a_list_of_frames(modality: str) -> None:
    """VLLM ignores the media type otherwise (`vllm/multimodal/media`)."""
    guessed = ["", "image/jpg", "image/jpeg", "text/plain", "audio/none", "audio/wav", "video/mp4"]
    keys = {content_key(ALICE, modality, Inline(kind, b"YWJj")) for kind in guessed}
    frames = content_key(ALICE, modality, Inline(FRAMES, b"YWJj"))

    assert len(keys) == 1
    assert (frames in keys) == (modality != "video")


@given(aliases, aliases)
def test_alias_keys_are_equal_exactly_where_all_they_cover_is(
    one: tuple[Scope, str, str], other: tuple[Scope, str, str]
) -> None:
    assert (one == other) == (name_key(*one) == name_key(*other))


@given(scopes, words)
def test_text_that_moves_between_parts_changes_the_key(scope: Scope, joined: str) -> None:
    """Independent examples would rarely differ only in where one part ends."""
    cuts = range(len(joined) + 1)
    keys = {content_key(scope, joined[:at], Inline("", joined[at:].encode())) for at in cuts}

    assert len(keys) == len(cuts)


@given(scopes.filter(lambda scope: scope.tenant), words, words, words)
@pytest.mark.security("S11")
def test_no_alias_is_the_key_of_content_or_a_salt(
    scope: Scope, modality: str, media_type: str, name: str
) -> None:
    names = {
        name_key(scope, modality, name),
        content_key(scope, modality, Inline(media_type, name.encode())),
        with_salt({"cache_salt": name or None}, scope)["cache_salt"],
    }

    assert len(names) == 3


@pytest.mark.security("S11")
def test_tenants_have_keys_of_their_own_and_share_where_they_shall() -> None:
    assert content_key(ALICE, "image", CAT) != content_key(BOB, "image", CAT)
    assert name_key(ALICE, "image", "cat") != name_key(BOB, "image", "cat")
    assert content_key(Scope(), "image", CAT) == content_key(Scope(None), "image", CAT)
    assert content_key(Scope(), "image", CAT) != content_key(Scope(Tenant("")), "image", CAT)


@pytest.mark.security("S11")
def test_content_keys_and_salts_depend_on_the_secret() -> None:
    known = Scope(Tenant("alice"), b"secret")

    assert content_key(known, "image", CAT) != content_key(ALICE, "image", CAT)
    assert with_salt({}, known) != with_salt({}, ALICE)


def test_uuids_are_valid_for_vllm_and_all_stores() -> None:
    salt = with_salt({"cache_salt": "@/\\\0"}, ALICE)["cache_salt"]
    for name in (content_key(ALICE, "image", CAT), name_key(ALICE, "image", "cat"), salt):
        assert len(name) == 64
        assert set(name) <= set("0123456789abcdef")


def test_keys_are_the_same_as_in_earlier_versions() -> None:
    """A changed key turns every stored entry into a miss: that belongs in the changelog.

    If a key could stand for other content than before, `VERSION` must change too.
    """
    key = content_key(Scope(), "image", CAT)

    assert key == "00f7311ae37f892c5977658c83a205a246491ad58947f4a20853ec3882286f37"


def test_a_tenants_salt_is_its_own_and_steady() -> None:
    body = {"messages": [], "seed": 1}

    assert with_salt(body, ALICE) == with_salt(body, ALICE)
    assert with_salt(body, ALICE)["cache_salt"] != with_salt(body, BOB)["cache_salt"]
    assert with_salt(body, ALICE) == {**body, "cache_salt": with_salt(body, ALICE)["cache_salt"]}


@given(words.filter(bool), words.filter(bool))
def test_a_clients_salt_is_mixed_in_and_never_sent(one: str, other: str) -> None:
    mixed = with_salt({"cache_salt": one}, ALICE)["cache_salt"]

    assert mixed not in {one, with_salt({}, ALICE)["cache_salt"]}
    assert mixed != with_salt({"cache_salt": one}, BOB)["cache_salt"]
    assert (mixed == with_salt({"cache_salt": other}, ALICE)["cache_salt"]) == (one == other)


@pytest.mark.security("S12")
def test_a_client_cannot_take_anothers_salt() -> None:
    theirs = with_salt({}, BOB)["cache_salt"]

    assert with_salt({"cache_salt": theirs}, ALICE)["cache_salt"] != theirs


@pytest.mark.parametrize("wrong", ["", 1, ["a"], {}, False])
def test_a_salt_that_vllm_would_not_take_is_refused(wrong: object) -> None:
    with pytest.raises(BadRequest) as refused:
        with_salt({"cache_salt": wrong}, ALICE)

    assert refused.value.param == "cache_salt"


@pytest.mark.parametrize("body", [{}, {"cache_salt": "mine"}, {"cache_salt": 1}])
def test_with_shared_isolation_the_body_is_unchanged(body: dict[str, object]) -> None:
    assert with_salt(body, Scope(None, b"secret")) == body


def test_the_key_of_a_conversation_is_a_tenants_own_of_a_model_and_a_salt() -> None:
    alice, bob = Scope(Tenant("alice")), Scope(Tenant("bob"))
    keys = {
        conversation_key(scope, body, name)
        for scope in (alice, bob, Scope(ANONYMOUS))
        for body in ({"model": "m"}, {"model": "n"}, {}, {"model": "m", "cache_salt": "s"})
        for name in ("a", "b")
    }

    assert len(keys) == 24
    assert all(len(key) == 64 for key in keys)


def output(uuid: str, model: str | None = "adapter", **more: Any) -> OutputKey:
    return OutputKey(model, uuid, named=True, kwargs=b"")._replace(**more)


def test_a_named_item_is_found_under_its_own_key() -> None:
    assert Identifiers().identifier_of(output("a")) == "a"


@pytest.mark.parametrize("more", [{"named": False}, {"kwargs": b"{}"}])
def test_identifiers_of_other_outputs_are_learned_from_engines(more: dict[str, Any]) -> None:
    identifiers = Identifiers()
    assert identifiers.identifier_of(output("a", **more)) is None

    identifiers.learn_identifier(output("a", **more), "hash")
    identifiers.learn_identifier(output("b"), "adapter:b")
    assert identifiers.identifier_of(output("a", **more)) == "hash"
    assert identifiers.identifier_of(output("c", **more)) is None


def test_the_prefix_of_an_adapter_is_learned_from_one_answer() -> None:
    """The engine adds the adapter's name to the key if the adapter changes the encoder."""
    identifiers = Identifiers()
    identifiers.learn_identifier(output("a"), "adapter:a")

    assert identifiers.identifier_of(output("b")) == "adapter:b"
    assert identifiers.identifier_of(output("b", model="base")) == "b"


def test_an_identifier_without_the_uuid_is_kept_only_for_its_item() -> None:
    identifiers = Identifiers()
    identifiers.learn_identifier(output("a"), "hash")

    assert [identifiers.identifier_of(output(uuid)) for uuid in "ab"] == ["hash", "b"]
    identifiers.learn_identifier(output("a"), "adapter:a")
    assert [identifiers.identifier_of(output(uuid)) for uuid in "ab"] == ["adapter:a", "adapter:b"]


def test_an_adapter_that_has_no_prefix_any_more_is_learned_too() -> None:
    identifiers = Identifiers()
    identifiers.learn_identifier(output("a"), "adapter:a")
    identifiers.learn_identifier(output("b"), "b")

    assert [identifiers.identifier_of(output(uuid)) for uuid in "abc"] == ["a", "b", "c"]
