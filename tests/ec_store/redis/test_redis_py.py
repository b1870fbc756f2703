"""Names of redis-py that the store uses. A release may change them."""

from importlib.metadata import requires

import redis
from redis.crc import key_slot


def test_redis_py_parses_the_addresses_in_redirections() -> None:
    moved = redis.exceptions.MovedError("7 h:1")
    ask = redis.exceptions.AskError("8 ::1:2")

    assert (moved.slot_id, moved.host, moved.port) == (7, "h", 1)
    assert (ask.slot_id, ask.host, ask.port) == (8, "::1", 2)


def test_redis_py_computes_the_slot_of_a_key_by_its_tag() -> None:
    assert key_slot(b"{a}b") == key_slot(b"a")


def test_the_next_major_version_of_redis_py_is_not_installed_unseen() -> None:
    [bound] = [one for one in requires("ec-store") or [] if one.startswith("redis<")]

    assert bound.startswith(f"redis<{int(redis.__version__.split('.')[0]) + 1},")
