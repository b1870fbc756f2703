"""500s of one request: whether it may be sent again."""

from collections.abc import Hashable
from typing import Any, cast

import pytest

from epd.errors import UpstreamRejected
from epd.routing.doubts import Doubts


class Sent:
    """Ended request at a proven instance."""

    was_proven = True


@pytest.mark.parametrize(
    ("subjects", "spent"),
    [
        ((), False),
        (("a",), False),
        (("a", "b"), False),
        (("a", "b", "a"), True),
        ((None,), False),
        ((None, "a"), True),
        ((None, None), True),
    ],
)
def test_only_500s_of_one_item_or_of_the_whole_request_add_up(
    subjects: tuple[Hashable, ...], spent: bool
) -> None:
    doubts = Doubts()
    for subject in subjects:
        error = UpstreamRejected(500, b"", stage="decode", headers={})
        assert error.engine_failed
        doubts.add(error, cast("Any", Sent()), subject)

    assert doubts.is_spent is spent


@pytest.mark.parametrize(
    ("named", "spent"),
    [((True,), False), ((True, False), False), ((True, True), False), ((True, False, True), True)],
)
def test_one_500_to_named_media_is_let_pass(named: tuple[bool, ...], spent: bool) -> None:
    doubts = Doubts()
    for names in named:
        error = UpstreamRejected(500, b"", stage="decode", headers={})
        doubts.add(error, cast("Any", Sent()), names=names)

    assert doubts.is_spent is spent
