"""Whether policies suit a fleet whose instances are known from the start."""

from collections.abc import Sequence

from epd.policies.active import Active, decide
from epd.policies.catalogue import OWN, PolicyInvalid
from epd.policies.course import Facts
from epd.routing.instances import Role

PATH = "/v1/chat/completions"


def check_suited(
    policies: Sequence[Active], roles: frozenset[Role], *, pushed: bool, needed: bool
) -> None:
    """Refuse policies by which all requests of a kind would fail.

    What they say of two that nobody sends decides: one of text, and one with a picture.

    Args:
        policies: those in force.
        roles: of which there are instances, and always will be.
        pushed: whether consumers wait for the encoder output of every item (`ECTransfer.pushed`).
        needed: whether decode instances wait for the blocks of every prefill (`KVTransfer.needed`).

    Raises:
        PolicyInvalid: it says what does not go together.
    """
    served = False
    for items in (0, 1):
        decided = decide(policies, Facts(PATH, prefills=True, items=items, roles=roles))
        if decided is None:
            continue
        served, (name, course) = True, decided
        if needed and not course.prefill and Role.DECODE in roles:
            raise PolicyInvalid(
                f"{name} has decode instances prefill, and with this --kv-transfer they wait for "
                "the blocks of every request"
            )
        if items and course.encode and Role.ENCODE not in roles:
            raise PolicyInvalid(f"{name} has media encoded, and there is no encode instance")
        if items and pushed and not course.encode:
            raise PolicyInvalid(
                f"{name} has no media encoded, and with this --ec-transfer consumers wait for the "
                "encoder output of every item; --ec-consumer-zmq-addrs by itself chooses it too"
            )
    names = [one.name for one in policies]
    if not served and OWN.keys() >= set(names):  # others may look at what the two do not have
        raise PolicyInvalid(
            f"{', '.join(names)}: no request would be served, as there are instances of these "
            f"roles alone: {', '.join(sorted(roles))}"
        )
