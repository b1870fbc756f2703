"""Key of a conversation."""

from epd.encoder_cache.identity import conversation_key
from epd.tenants import ANONYMOUS, Scope, Tenant


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
