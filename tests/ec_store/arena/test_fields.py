from ec_store.arena.fields import encode_header, entry_infos
from ec_store.keys import EntryKey
from ec_store.testing.stores import key, sized


def header(of: EntryKey, length: int = 100) -> bytes:
    return encode_header(of, sized(length))


def test_a_header_is_parsed_once_until_it_changes() -> None:
    [first] = entry_infos([key()], [header(key())])
    [again] = entry_infos([key()], [header(key())])
    [changed] = entry_infos([key()], [header(key(), 200)])

    assert first is not None
    assert again is first
    assert changed is not None
    assert (first.shape, changed.shape) == ((50,), (100,))


def test_a_header_is_of_its_own_key_alone() -> None:
    mine, other = key(namespace="a"), key(namespace="b")
    [info] = entry_infos([mine], [header(mine)])

    assert info is not None
    assert entry_infos([other], [header(mine)]) == [None]
    assert entry_infos([mine, other], [header(mine), header(other)])[0] == info
    assert entry_infos([mine], [header(mine)[:-1]]) == [None]
    assert entry_infos([mine], [b""]) == [None]
