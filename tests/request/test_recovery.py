"""Recovery after a failed attempt: each row of the recovery tables, and failures without a row."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

import epd
from epd.api.chat import CHAT
from epd.api.items import MMItem
from epd.errors import (
    BadRequest,
    EncodeMismatch,
    MediaFetchFailed,
    NoInstance,
    ProxyError,
    Stage,
    SuspectedFatal,
    UpstreamBusy,
    UpstreamDenied,
    UpstreamDied,
    UpstreamFailed,
    UpstreamRejected,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from epd.policies.policy import Course
from epd.request.attempt import NO_PROMPT, Attempt, SendForm
from epd.request.encode_retries import (
    ENCODE_RULES,
    FETCH_AGAIN_S,
    EncodeFailure,
    encode_delay_s,
)
from epd.request.recovery import (
    MAX_ATTEMPTS,
    MAX_FAILURES,
    RULES,
    FailedAttempt,
    next_attempt,
)
from epd.request.request import Request
from epd.routing.instances import Instance, Role
from epd.transfer.encoded import EncodedItem, OutputFacts, Prompt
from tests.requests import image, request, text

CONFIG = epd.ProxyConfig(encode_servers_urls=("http://e:1",), decode_servers_urls=("http://d:1",))
FIRST = Attempt(Request("r", {}, CONFIG), Course(), [])
FAIL = Request("r", {}, CONFIG.model_copy(update={"on_prefill_failure": "fail"}))
"""A request that decode may not prefill."""
P1, P2 = (Instance(Role.PREFILL, f"http://p{number}:1") for number in (1, 2))
D1, D2 = (Instance(Role.DECODE, f"http://d{number}:1") for number in (1, 2))


def item(*, has_media: bool = True) -> MMItem:
    part = image() if has_media else {"type": "image_url", "image_url": None, "uuid": "u"}
    [found] = CHAT.items(request(part, text()))
    return found


def failure(  # noqa: PLR0913 - the parts of a failure
    error: ProxyError,
    *,
    attempt: Attempt | None = None,
    tried: Instance | None = P1,
    prefilled: bool = False,
    reads_back: bool = False,
    items: Sequence[EncodedItem] | None = (EncodedItem(item(), OutputFacts(), "encoded"),),
    others: bool = True,
    local: bool = True,
    **prompt: Any,
) -> FailedAttempt:
    """Return a failure of an attempt at P1 or D1, with an encoder output in the request."""
    attempt = attempt or FIRST
    if items is not None:
        attempt = attempt._replace(encoded_items=items)
    sent = Prompt({}, depends=True, bare=(item(),))._replace(**prompt)
    attempt = attempt._replace(prompt=sent)
    at_prefill = error.stage == "prefill" and tried is not None
    prefill = P1 if at_prefill or prefilled or reads_back else None
    decode = D1 if error.stage != "prefill" and tried is not None else None
    if not local:
        attempt = attempt._replace(request=FAIL)
    return FailedAttempt(attempt, error, others, prefill, decode, reads_back)


def failed(stage: Stage, answered: int | None = None) -> UpstreamFailed:
    return UpstreamFailed("x", stage=stage, answered=answered)


def rejected(status: int, stage: Stage = "decode") -> UpstreamRejected:
    return UpstreamRejected(status, b"", stage=stage, headers={})


def unreachable(stage: Stage) -> UpstreamUnreachable:
    return UpstreamUnreachable("x", stage=stage)


DOUBTFUL = FIRST._replace(avoided_decodes=(D2,), doubtful=D2, failures=("decode",))
DOUBTFUL_PREFILL = FIRST._replace(avoided_prefills=(P2,), doubtful=P2, failures=("prefill",))

DIED_AT_PREFILL = UpstreamDied("x", stage="prefill")

ROWS: list[tuple[int, FailedAttempt, dict[str, Any]]] = [
    (
        1,
        failure(failed("prefill"), reads_back=True),
        {"avoided_prefills": ()},
    ),
    (
        1,
        failure(failed("prefill", 500), reads_back=True),
        {"avoided_prefills": ()},
    ),
    (
        4,
        failure(
            rejected(500),
            depends=False,
            named=True,
            attempt=FIRST._replace(failures=("decode",)),
        ),
        {
            "form": SendForm.UNNAMED,
            "avoided_decodes": (D1,),
            "failures": ("decode", "decode"),
        },
    ),
    (
        4,
        failure(failed("prefill", 500), depends=False, named=True),
        {"form": SendForm.UNNAMED, "failures": ("prefill",)},
    ),
    (
        2,
        failure(rejected(400)),
        {"form": SendForm.MEDIA, "avoided_decodes": (D1,)},
    ),
    (
        3,
        failure(rejected(500)),
        {"reencode": True, "avoided_decodes": (D1,), "failures": ("decode",), "doubtful": D1},
    ),
    (5, failure(failed("prefill")), {"failures": ("prefill",)}),
    (
        7,
        failure(
            failed("prefill"),
            attempt=FIRST._replace(avoided_prefills=(P2,), failures=("prefill",)),
        ),
        {"avoided_prefills": (P2, P1), "failures": ("prefill", "prefill"), "without_prefill": True},
    ),
    (
        5,
        failure(rejected(500), prefilled=True, depends=False),
        {"avoided_decodes": (D1,), "failures": ("decode",), "doubtful": D1},
    ),
    *(
        (5, failure(error), {"avoided_decodes": (D1,), "failures": ("decode",)})
        for error in (failed("decode"), UpstreamTimeout("x", stage="decode"))
    ),
    (
        5,
        failure(rejected(500), depends=False),
        {"avoided_decodes": (D1,), "failures": ("decode",), "doubtful": D1},
    ),
    (
        6,
        failure(unreachable("decode"), others=False, attempt=DOUBTFUL),
        {"avoided_decodes": (D1,), "failures": ("decode",), "doubtful": None},
    ),
    *(
        (
            6,
            failure(error, attempt=DOUBTFUL),
            {"avoided_decodes": (D1,), "failures": ("decode", "decode"), "doubtful": None},
        )
        for error in (rejected(503), failed("decode"), UpstreamDied("x", stage="decode"))
    ),
    *(
        (
            6,
            failure(error, others=False, attempt=DOUBTFUL_PREFILL),
            {"avoided_prefills": (P1,), "failures": ("prefill", "prefill"), "doubtful": None},
        )
        for error in (
            UpstreamBusy("x", stage="prefill"),
            UpstreamTimeout("x", stage="prefill"),
            failed("prefill"),
        )
    ),
    # The instance that lacked an entry is not avoided if the others have failed before.
    (
        3,
        failure(
            rejected(500),
            others=False,
            attempt=FIRST._replace(avoided_decodes=(D2,), failures=("decode",)),
        ),
        {
            "reencode": True,
            "avoided_decodes": (D2,),
            "failures": ("decode", "decode"),
            "doubtful": D1,
        },
    ),
    (
        3,
        failure(
            failed("prefill", 500),
            others=False,
            attempt=FIRST._replace(avoided_prefills=(P2,), failures=("prefill",)),
        ),
        {
            "reencode": True,
            "avoided_prefills": (P2,),
            "failures": ("prefill", "prefill"),
            "doubtful": P1,
        },
    ),
    (
        3,
        failure(failed("prefill", 500)),
        {"reencode": True, "failures": ("prefill",), "doubtful": P1},
    ),
    # An instance that failed without dying gets the request again.
    (5, failure(failed("prefill"), others=False), {"failures": ("prefill",)}),
    # Each stage counts its own failures.
    (
        5,
        failure(failed("prefill"), attempt=FIRST._replace(failures=("decode",))),
        {"failures": ("decode", "prefill")},
    ),
    (
        5,
        failure(failed("decode"), attempt=FIRST._replace(failures=("prefill",))),
        {"avoided_decodes": (D1,), "failures": ("prefill", "decode")},
    ),
    # A 500 of prefill makes no decode instance doubtful.
    (
        5,
        failure(
            failed("prefill", 500),
            depends=False,
            attempt=FIRST._replace(avoided_decodes=(D2,)),
        ),
        {"avoided_decodes": (D2,), "failures": ("prefill",)},
    ),
    # Decode has failed, although prefill was asked to read blocks back.
    (
        5,
        failure(failed("decode"), reads_back=True),
        {"avoided_decodes": (D1,), "failures": ("decode",)},
    ),
    # An instance that was not reached has neither failed nor read blocks back.
    (5, failure(unreachable("prefill"), reads_back=True), {}),
    # The only prefill instance that died is asked again only if decode cannot prefill.
    (5, failure(DIED_AT_PREFILL), {"failures": ("prefill",)}),
    (5, failure(DIED_AT_PREFILL, others=False, local=False), {"failures": ("prefill",)}),
    (
        7,
        failure(DIED_AT_PREFILL, others=False),
        {"failures": ("prefill",), "without_prefill": True},
    ),
    # A request that a prefill instance had keeps its need of a new id.
    (
        5,
        failure(failed("decode"), attempt=FIRST._replace(resent=True)),
        {"avoided_decodes": (D1,), "failures": ("decode",)},
    ),
]


@pytest.mark.parametrize(("row", "case", "changes"), ROWS)
def test_a_row_makes_the_next_attempt(
    row: int, case: FailedAttempt, changes: dict[str, Any]
) -> None:
    applies = [number for number, rule in enumerate(RULES, 1) if rule.applies(case)]
    assert applies[0] == row

    attempt = next_attempt(case)

    # An attempt keeps the fields of the one before, but for those named here.
    unsaid: dict[str, Any] = {"prompt": NO_PROMPT}
    if changes.get("reencode"):
        unsaid |= {"encoded_items": None, "form": SendForm.MEDIA}
    if case.prefill is not None:
        unsaid |= {"avoided_prefills": (P1,), "resent": True}
    assert attempt == case.attempt._replace(**unsaid | changes)


def test_decode_prefills_before_unreachable_instances_use_up_all_attempts() -> None:
    attempt, chosen = failure(unreachable("prefill")).attempt, 0
    while not attempt.without_prefill:
        chosen += 1
        error = UpstreamUnreachable("x", stage="prefill")
        following = next_attempt(failure(error, attempt=attempt))
        assert following is not None
        attempt = following

    assert chosen == MAX_ATTEMPTS - MAX_FAILURES


def test_every_row_has_a_case() -> None:
    assert {row for row, _, _ in ROWS} == set(range(1, len(RULES) + 1))


@pytest.mark.parametrize(
    "case",
    [
        failure(failed("encode")),
        failure(rejected(400, "encode")),
        failure(rejected(500, "encode")),
        failure(BadRequest("x")),
        failure(UpstreamDenied("x", stage="prefill")),
        failure(SuspectedFatal("x", stage="decode")),
        failure(rejected(404)),
        failure(UpstreamTimeout("x", stage="decode"), others=False),
        failure(
            UpstreamTimeout("x", stage="decode"),
            attempt=FIRST._replace(failures=("decode",)),
        ),
        failure(unreachable("decode"), others=False),
        failure(unreachable("decode"), others=False, prefilled=True),
        failure(unreachable("decode"), others=False, attempt=DOUBTFUL._replace(doubtful=D1)),
        failure(UpstreamTimeout("x", stage="decode"), attempt=DOUBTFUL),
        failure(rejected(500), attempt=DOUBTFUL._replace(reencode=True)),
        failure(
            failed("prefill", 500),
            others=False,
            local=False,
            attempt=DOUBTFUL_PREFILL._replace(reencode=True),
        ),
        failure(
            failed("prefill"),
            others=False,
            local=False,
            attempt=DOUBTFUL_PREFILL._replace(doubtful=P1),
        ),
        failure(
            UpstreamDenied("x", stage="prefill"),
            local=False,
            attempt=DOUBTFUL_PREFILL,
        ),
        failure(rejected(404), attempt=DOUBTFUL),
        failure(
            unreachable("prefill"),
            others=False,
            local=False,
            attempt=DOUBTFUL,
        ),
        failure(UpstreamBusy("x", stage="prefill"), others=False, local=False),
        failure(failed("decode"), attempt=FIRST._replace(failures=("decode",))),
        failure(
            rejected(500),
            prefilled=True,
            depends=False,
            attempt=FIRST._replace(failures=("decode",)),
        ),
        failure(rejected(400), attempt=FIRST._replace(form=SendForm.MEDIA)),
        failure(rejected(400), bare=()),
        failure(
            rejected(500),
            depends=False,
            named=True,
            attempt=DOUBTFUL._replace(form=SendForm.UNNAMED, doubtful=D1),
        ),
        failure(rejected(500), depends=False, others=False),
        failure(rejected(500), attempt=FIRST._replace(reencode=True, failures=("decode",))),
        failure(
            failed("prefill"),
            attempt=FIRST._replace(failures=("prefill",)),
            local=False,
        ),
        # A consumer that expects a push depends on it after a second encode too.
        failure(
            rejected(500),
            others=False,
            attempt=FIRST._replace(reencode=True, failures=("prefill",)),
        ),
        # Metadata that were refused stay refused if an item has no media.
        failure(rejected(400), items=(EncodedItem(item(has_media=False), OutputFacts(), "hit"),)),
    ],
)
def test_the_client_gets_the_error(case: FailedAttempt) -> None:
    assert next_attempt(case) is None


@pytest.mark.parametrize("known", [None, (EncodedItem(item(), OutputFacts(), "encoded"),)])
def test_an_attempt_that_failed_before_its_encode_leaves_those_of_an_earlier_one(
    known: Sequence[EncodedItem] | None,
) -> None:
    error = NoInstance("x", stage="prefill")
    attempt = next_attempt(failure(error, items=known, tried=None))

    assert attempt is not None
    assert attempt.encoded_items is known


MAKERS: list[Callable[[Stage], ProxyError]] = [
    failed,
    unreachable,
    lambda stage: failed(stage, 500),
    lambda stage: UpstreamTimeout("x", stage=stage),
    lambda stage: UpstreamDied("x", stage=stage),
    lambda stage: NoInstance("x", stage=stage),
    lambda stage: UpstreamBusy("x", stage=stage, retry_after_s=1.0),
    *[partial(rejected, status) for status in (400, 404, 408, 429, 500, 502, 503, 504)],
]
STAGES: tuple[Stage, ...] = ("prefill", "decode")
ERRORS = [make(stage) for stage in STAGES for make in MAKERS]


FLAGS = ("resent", "reencode", "form", "without_prefill")


class LongestCourse:
    """The most instances that a request can reach, over all courses of failures.

    Failures of unreachable instances do not count. At most `unreached` of them are tried, because
    they alone have no end.
    """

    def __init__(self, *, local: bool, others: bool, unreached: int) -> None:
        self._others, self._local = others, local
        self._unreached = unreached
        self._known: dict[object, int] = {}

    def after(self, attempt: Attempt, unreached: int = 0) -> int:
        state = (
            len(attempt.avoided_prefills),
            attempt.doubtful in attempt.avoided_prefills,
            attempt.doubtful in attempt.avoided_decodes,
            *sorted(attempt.failures),
            *(getattr(attempt, flag) for flag in FLAGS),
            unreached,
        )
        if state not in self._known:
            self._known[state] = max(
                self._with(error, attempt, unreached)
                for error in ERRORS
                if not (attempt.without_prefill and error.stage == "prefill")
            )
        return self._known[state]

    def _with(self, error: ProxyError, attempt: Attempt, unreached: int) -> int:
        reached = not isinstance(error, UpstreamUnreachable)
        unreached += not reached
        if unreached > self._unreached:
            return 0
        # Media are sent after a lost entry; a consumer that expects a push depends on it even then.
        cases = [
            failure(
                error,
                attempt=attempt,
                depends=depends,
                named=not (depends or attempt.form is SendForm.UNNAMED),
                reads_back=not attempt.resent,  # a turn leaves its blocks to one attempt
                others=self._others,
                local=self._local,
            )
            for depends in (True, False)
        ]
        following = [later for case in cases if (later := next_attempt(case)) is not None]
        return reached + max((self.after(later, unreached) for later in following), default=0)


@pytest.mark.parametrize("unreached", [0, 2])
@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize(("local", "most"), [(True, MAX_ATTEMPTS), (False, MAX_ATTEMPTS - 1)])
def test_the_longest_course_of_failures_takes_all_attempts(
    local: bool, most: int, others: bool, unreached: int
) -> None:
    """With it, `MAX_ATTEMPTS` is neither too small nor too large."""
    longest = LongestCourse(local=local, others=others, unreached=unreached)

    assert longest.after(FIRST) == most


def encode_failure(error: ProxyError, **more: Any) -> EncodeFailure:
    given = {"tries": 1, "server_errors": 1, "elapsed_s": 0.0, "others": True, "falls_back": True}
    return EncodeFailure(error, **{"patience_s": 5.0, **given, **more})


BUG = UpstreamFailed("x", stage="encode", answered=500)
FETCH = MediaFetchFailed("x", stage="encode")
DIED = UpstreamDied("x", stage="encode")
BUSY = UpstreamBusy("x", stage="encode", retry_after_s=4.0)


@pytest.mark.parametrize(
    ("row", "case", "delay_s"),
    [
        (1, encode_failure(FETCH), 0.0),
        (1, encode_failure(FETCH, elapsed_s=FETCH_AGAIN_S), None),
        (1, encode_failure(FETCH, tries=2), None),
        (2, encode_failure(DIED, others=False), None),
        (2, encode_failure(DIED, others=False, falls_back=False), 0.0),
        (2, encode_failure(DIED, others=False, falls_back=False, tries=2), None),
        (3, encode_failure(BUG), 0.0),
        (3, encode_failure(BUG, server_errors=2), None),
        (3, encode_failure(BUG, others=False), None),
        (3, encode_failure(BUG, others=False, falls_back=False), 0.0),
        (3, encode_failure(BUG, others=False, falls_back=False, server_errors=2), None),
        (4, encode_failure(DIED), 0.0),
        (4, encode_failure(failed("encode"), others=False), 0.0),
        (4, encode_failure(BUSY), 0.0),
        (4, encode_failure(BUSY, others=False), 4.0),
        (4, encode_failure(BUSY, others=False, patience_s=4.0), 4.0),
        (4, encode_failure(BUSY, others=False, patience_s=3.0), None),
    ],
)
def test_rows_state_when_an_item_is_encoded_again(
    row: int, case: EncodeFailure, delay_s: float | None
) -> None:
    applies = [number for number, rule in enumerate(ENCODE_RULES, 1) if rule.applies(case)]

    assert applies[0] == row
    assert encode_delay_s(case) == delay_s


@pytest.mark.parametrize(
    "error",
    [
        BadRequest("x"),
        EncodeMismatch("x"),
        SuspectedFatal("x", stage="encode"),
        rejected(400, "encode"),
        UpstreamDenied("x", stage="encode"),
    ],
)
@pytest.mark.parametrize("others", [True, False])
def test_a_faulty_item_is_not_encoded_again(error: ProxyError, others: bool) -> None:
    assert encode_delay_s(encode_failure(error, others=others, falls_back=False)) is None
