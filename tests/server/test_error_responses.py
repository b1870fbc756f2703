"""Errors of instances: what the client gets and what the log has; the time of a stage."""

import orjson
import pytest

from epd.errors import BadRequest, UpstreamRejected
from epd.server.error_responses import reason_of


def test_an_error_has_openais_shape() -> None:
    error = BadRequest("no", param="messages")

    assert orjson.loads(error.body()) == {
        "error": {"message": "no", "type": "BadRequestError", "param": "messages", "code": 400}
    }


def rejected(reply: bytes) -> UpstreamRejected:
    return UpstreamRejected(400, reply, stage="decode", headers={})


def test_an_instances_openai_error_is_kept_byte_for_byte() -> None:
    reply = b'{ "error": {"message": "m", "extra": 1} }'

    assert rejected(reply).body() == reply


@pytest.mark.security("S19")
@pytest.mark.parametrize(
    ("error", "logged"),
    [
        ({"type": "NotFoundError", "param": "model"}, "400 NotFoundError (param model)"),
        ({"type": "invalid_request_error"}, "400 invalid_request_error"),
        ({"type": "T", "param": "messages[0].content[2]"}, "400 T (param messages[0])"),
        ({"type": "T", "param": "body.messages.0.content"}, "400 T (param messages.0)"),
        ({"type": "T", "param": "body.logit_bias.PRIVATE"}, "400 T (param logit_bias)"),
        ({"type": "T", "param": "a PRIVATE text"}, "400 T"),
        ({"type": "T", "param": "x" * 65}, "400 T"),
        ({"type": "T", "param": "caf\u00e9"}, "400 T"),
        ({"type": "T", "param": {"PRIVATE": 1}}, "400 T"),
        ({"type": "a PRIVATE text", "param": "model"}, "400 (param model)"),
        ({"type": ["PRIVATE"]}, "400"),
    ],
)
def test_an_instances_error_is_logged_without_text(error: dict[str, object], logged: str) -> None:
    said = rejected(orjson.dumps({"error": {"message": "PRIVATE", **error}}))

    assert reason_of(said) == f"the decode instance answered {logged}"


def test_the_param_of_an_instances_failure_is_not_logged() -> None:
    said = b'{"error": {"message": "m", "type": "InternalServerError", "param": "PRIVATE"}}'
    error = UpstreamRejected(500, said, stage="decode", headers={})

    assert reason_of(error) == "the decode instance answered 500 InternalServerError"


def test_and_names_the_clients_part_where_that_is_known() -> None:
    error = rejected(b'{"error": {"message": "m", "param": "messages[0].content[0]", "extra": 1}}')
    error.param = "messages[3].content[2]"

    said = orjson.loads(error.body())["error"]
    assert (said["message"], said["param"], said["extra"]) == ("m", "messages[3].content[2]", 1)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b"plain \xff", "plain \ufffd"),
        (b"", "the instance answered 400"),
        (b"[1]", "[1]"),
        (b"x" * 9999, "x" * 500),
    ],
)
def test_any_other_error_is_put_into_openais_shape(reply: bytes, message: str) -> None:
    assert orjson.loads(rejected(reply).body())["error"] == {
        "message": message,
        "type": "UpstreamError",
        "param": None,
        "code": 400,
    }


@pytest.mark.security("S19")
@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (b"cannot open <_io.BytesIO object at 0x7f3a5c2d1e90>", "<_io.BytesIO object at …>"),
        (b'{"detail": "no /srv/models/secret.bin"}', "no …"),
        (b'File "/usr/lib/python3/x.py", line 3', 'File "…", line 3'),
        (b"Bad Gateway", "Bad Gateway"),
        (b"and/or 3/4", "and/or 3/4"),
    ],
)
def test_errors_that_are_not_vllms_show_no_internals(said: bytes, shown: str) -> None:
    error = UpstreamRejected(500, said, stage="decode", headers={})

    assert shown in error.message
    assert error.detail["message"] == error.message
