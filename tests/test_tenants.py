import hashlib
import hmac
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.tenants import KEY, ApiKeys, KeysInvalid, Scope, Tenant, key_line, new_key, parse_keys
from tests.support.clients import ALICE, ALICE_2, BOB


def lines(*pairs: tuple[str, str]) -> bytes:
    return "\n".join(key_line(tenant, key) for tenant, key in pairs).encode()


def test_keys_are_their_tenants() -> None:
    keys = parse_keys(lines(("alice", ALICE), ("bob", BOB), ("alice", ALICE_2)))

    assert keys.tenant_of(ALICE) == keys.tenant_of(ALICE_2) == Tenant("alice")
    assert keys.tenant_of(BOB) == Tenant("bob")


@given(st.text())
@pytest.mark.security("S1")
def test_an_unknown_key_has_no_tenant(key: str) -> None:
    assert parse_keys(lines(("alice", ALICE))).tenant_of(key) is None


@pytest.mark.security("S1")
def test_a_hash_is_not_accepted_as_a_key() -> None:
    raw = lines(("alice", ALICE))

    assert parse_keys(raw).tenant_of(raw.decode().partition(":")[2]) is None


@pytest.mark.security("S1")
@pytest.mark.parametrize("presented", [ALICE, "nobody's", "", "\udcff"])
def test_a_key_is_looked_up_and_not_compared_with_every_known_key(
    monkeypatch: pytest.MonkeyPatch, presented: str
) -> None:
    compared = 0
    compare = hmac.compare_digest

    class Digest(bytes):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return super().__eq__(other)

        __hash__ = bytes.__hash__

    def count(one: bytes, other: bytes) -> bool:
        nonlocal compared
        compared += 1
        return compare(one, other)

    known = [ALICE, *(f"key-of-others-{number:04}" for number in range(1000))]
    digests = [Digest(hashlib.sha256(key.encode()).digest()) for key in known]
    keys = ApiKeys({digest: Tenant("t") for digest in digests})
    monkeypatch.setattr(hmac, "compare_digest", count)
    compared = 0

    found = keys.tenant_of(presented)

    assert (found is not None) == (presented == ALICE)
    assert compared <= 1


def test_comments_blank_lines_and_spaces() -> None:
    line = lines(("alice", ALICE)).decode()
    upper = line[:6] + line[6:].upper()
    raw = f"\n# kéys \u2028 of ours\r\n\r\n  {upper.replace(':', ' : ')}  \r\n".encode()

    assert parse_keys(raw).tenant_of(ALICE) == Tenant("alice")


@pytest.mark.parametrize(
    "wrong",
    [
        b"alice:sk-a-key-itself",
        b"alice",
        b"sk-a-key-itself",
        b":" + b"0" * 64,
        b"al ice:" + b"0" * 64,
        b"al\xff:" + b"0" * 64,
        b"a" * 65 + b":" + b"0" * 64,
        b"alice:" + b"0" * 63,
        b"alice:" + b"0" * 65,
        b"alice:" + b"g" * 64,
        lines(("bob", ALICE)),
    ],
)
def test_a_wrong_line_is_named_and_not_shown(wrong: bytes) -> None:
    with pytest.raises(KeysInvalid) as invalid:
        parse_keys(b"# keys\n" + lines(("alice", ALICE)) + b"\n\n" + wrong + b"\n")

    assert "line 4 " in str(invalid.value)
    assert "sk-a-key" not in str(invalid.value)
    assert "\n" not in str(invalid.value)


@pytest.mark.parametrize("raw", [b"", b"\n", b"# alice\n"])
@pytest.mark.security("S1")
def test_a_file_without_keys_opens_nothing(raw: bytes) -> None:
    with pytest.raises(KeysInvalid):
        parse_keys(raw)


@given(st.binary(max_size=200))
def test_any_file_is_read_or_refused(raw: bytes) -> None:
    with suppress(KeysInvalid):
        assert isinstance(parse_keys(raw), ApiKeys)


def test_new_keys_are_long_and_different() -> None:
    keys = {new_key() for _ in range(100)}

    assert len(keys) == 100
    assert all(KEY.fullmatch(key) and len(key) >= 40 for key in keys)


@pytest.mark.parametrize(
    ("tenant", "key"),
    [("", ALICE), ("al:ice", ALICE), ("a" * 65, ALICE), ("a\n", ALICE)]
    + [("alice", key) for key in ("short", "a key with spaces in it", "é" * 20, "x" * 513)],
)
def test_tenant_names_that_a_line_cannot_hold_are_rejected(tenant: str, key: str) -> None:
    with pytest.raises(ValueError, match=r"a (tenant's name|key) has"):
        key_line(tenant, key)


def test_a_scope_does_not_show_its_secret() -> None:
    assert "s3cret" not in repr(Scope(Tenant("alice"), b"s3cret"))
