"""Instances, configuration, errors and events."""

import orjson
import pytest
from pydantic import ValidationError

from epd.config import ProxyConfig
from epd.errors import BadRequest, UpstreamRejected
from epd.events import StageDone, stage_seconds
from epd.routing.instances import Role
from epd.server.responses import reason_of

PROXY_FETCH = {"media_fetch": "proxy"}
WRONG_DOMAINS = ["https://a.test", "a.test/x", "a.test:443", "*.a.test", "u@a.test", "a.test,", "["]
E, D = "http://e:1", "http://d:1"


def config(**more: object) -> ProxyConfig:
    return ProxyConfig.model_validate({"encode_servers_urls": E, "decode_servers_urls": D} | more)


@pytest.mark.parametrize("spelling", ["", "disable", "none", "None", " "])
def test_decode_instances_prefill_without_prefill_urls(spelling: str) -> None:
    roles = {instance.role for instance in config(prefill_servers_urls=spelling).instances}

    assert roles == {Role.ENCODE, Role.PREFILL_DECODE}


@pytest.mark.parametrize("spelling", ["", "disable", "none", "None", " "])
@pytest.mark.parametrize("prefill", ["", "http://p:1"])
def test_config_without_encode_urls_has_no_encode_stage(spelling: str, prefill: str) -> None:
    made = config(encode_servers_urls=spelling, prefill_servers_urls=prefill)

    roles = {Role.PREFILL, Role.DECODE} if prefill else {Role.PREFILL_DECODE}
    assert {instance.role for instance in made.instances} == roles
    assert not made.encodes
    assert config().encodes


def test_encode_urls_are_not_forgotten() -> None:
    with pytest.raises(ValidationError, match="--encode-servers-urls is required"):
        ProxyConfig.model_validate({"decode_servers_urls": D})


def test_url_lists() -> None:
    made = config(
        encode_servers_urls="http://a:1/, https://b/base", prefill_servers_urls="http://p"
    )

    assert made.encode_servers_urls == ("http://a:1", "https://b/base")
    assert {instance.role for instance in made.instances} == {
        Role.ENCODE,
        Role.PREFILL,
        Role.DECODE,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"encode_servers_urls": "none", "ec_store": "file:///ec?max_bytes=1GiB"},
        {"decode_servers_urls": ""},
        {"encode_servers_urls": "e:8001"},
        {"encode_servers_urls": "ftp://e:1"},
        {"encode_servers_urls": "http://e:99999"},
        {"encode_servers_urls": "http://u:p@e"},
        {"encode_servers_urls": "http://e?x"},
        {"encode_servers_urls": f"{E},{E}/"},
        {"prefill_servers_urls": D},
        {"prefill_servers_urls": "http://D:1/"},
        {"decode_servers_urls": "http://d d:1"},
        {"decode_servers_urls": "http://d:1\nx"},
        {"port": -1},
        {"encode_timeout_s": 0},
        {"encode_timeout_s": float("inf")},
        {"decode_media": "both"},
        {"media_fetch": "both"},
        *(PROXY_FETCH | {"allowed_media_domains": wrong} for wrong in WRONG_DOMAINS),
        {"allowed_media_domains": "a.test"},
        {"allow_http_media": True},
        PROXY_FETCH | {"allow_private_media": True},
        PROXY_FETCH | {"media_fetch_trust_env": True},
        {"media_fetch_trust_env": True, "allowed_media_domains": "a.test"},
        {"unknown": 1},
    ],
)
def test_a_wrong_configuration_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        config(**wrong)


def test_media_domains_are_spelled_as_urls_are_read() -> None:
    domains = "Media.Test., bücher.test,10.0.0.1,[::1],::2"
    made = config(**PROXY_FETCH, allowed_media_domains=domains, allow_private_media=True)

    assert made.allowed_media_domains == (
        *("media.test", "xn--bcher-kva.test", "10.0.0.1", "::1", "::2"),
    )
    assert config(allowed_media_domains="").allowed_media_domains == ()


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


def test_a_stages_time_is_from_its_first_request_to_its_last_answer() -> None:
    stages = [
        StageDone("encode", "a", 10.0, 1.0, None),
        StageDone("encode", "b", 10.5, 2.0, None),
        StageDone("decode", "d", 12.5, 0.5, None),
    ]

    assert stage_seconds(stages) == {"encode": 2.5, "decode": 0.5}


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
