"""The check whether policies suit a fleet with fixed instances."""

from collections.abc import Sequence

from epd.policies.active import Active, decide
from epd.policies.catalogue import OWN, PolicyInvalid
from epd.policies.course import Facts
from epd.routing.instances import Role

PATH = "/v1/chat/completions"


def check_suited(policies: Sequence[Active], roles: frozenset[Role], *, pushed: bool) -> None:
    """Reject policies that would fail all requests of a kind.

    The check uses two sample requests: one of text, and one with a picture.

    Args:
        policies: policies in force.
        roles: roles with at least one instance, which are fixed.
        pushed: whether consumers wait for the encoder output of every item (`ECTransfer.pushed`).

    Raises:
        PolicyInvalid: the policies do not suit the fleet.
    """
    served = False
    for items in (0, 1):
        decided = decide(policies, Facts(PATH, prefills=True, items=items, roles=roles))
        if decided is None:
            continue
        served, (name, course) = True, decided
        if items and course.encode and Role.ENCODE not in roles:
            raise PolicyInvalid(f"{name} sends media to encode instances, but there are none")
        if items and pushed and not course.encode:
            raise PolicyInvalid(
                f"{name} skips the encode stage, but with this --ec-transfer consumers wait for "
                "the encoder output of every item (--ec-consumer-zmq-addrs alone selects that "
                "transfer too)"
            )
    names = [one.name for one in policies]
    if not served and OWN.keys() >= set(names):  # others may need other facts
        raise PolicyInvalid(
            f"{', '.join(names)}: no request would be served, because there are only instances of "
            f"these roles: {', '.join(sorted(roles))}"
        )
