"""Forms that instances receive, parsed by vLLM's own classes and its parser."""

import importlib
import json
import warnings
from importlib.util import find_spec
from typing import Annotated, Any

import pytest
from fastapi import FastAPI, Form
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from epd.api.endpoints import ENDPOINTS
from epd.api.passthrough import FIELDS
from epd.errors import ProxyError

pytestmark = pytest.mark.full

AUDIO = ENDPOINTS["/v1/audio/transcriptions"]
RESERVED = ("kv_transfer_params", "ec_transfer_params")
KIND = "multipart/form-data; boundary=b"
SOUND = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nsound'
HARMFUL = b'{"kv_transfer_params": "", "ec_transfer_params": 1}'


@pytest.fixture(scope="module")
def requests() -> Any:
    """Return vLLM's request classes of the endpoints that accept forms."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: scripts/test.sh installs it")
    with warnings.catch_warnings(action="ignore"):
        return [
            getattr(
                importlib.import_module(f"vllm.entrypoints.speech_to_text.{name}.protocol"), kind
            )
            for name, kind in (
                ("transcription", "TranscriptionRequest"),
                ("translation", "TranslationRequest"),
            )
        ]


@pytest.fixture(scope="module")
def engine(requests: Any) -> TestClient:
    """Return a server that parses forms like vLLM, and answers with the engine's arguments."""
    app = FastAPI()
    kind = requests[0]

    async def extra_args(request: Any) -> Any:
        return {
            "prompt": request.prompt,
            "unknown": sorted(request.model_extra or {}),
            "extra_args": request.to_sampling_params(1).extra_args,
        }

    extra_args.__annotations__["request"] = Annotated[kind, Form()]
    app.post("/")(extra_args)
    return TestClient(app, raise_server_exceptions=False)


def test_the_fields_are_those_that_vllm_knows(requests: Any) -> None:
    known = {field.alias or name for kind in requests for name, field in kind.model_fields.items()}

    assert known == FIELDS


def ask(engine: TestClient, raw: bytes, content_type: str) -> Any:
    return engine.post("/", content=raw, headers={"Content-Type": content_type})


@pytest.mark.fault(74)
@pytest.mark.security("S5")
def test_vllm_reads_reserved_fields_of_a_form_that_the_proxy_refuses(engine: TestClient) -> None:
    raw = b"--b\r\n" + SOUND
    raw += b'\r\n--b\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n' + HARMFUL
    raw += b"\r\n--b--\r\n"
    reached = ask(engine, raw, KIND).json()["extra_args"]

    assert reached == json.loads(HARMFUL)
    with pytest.raises(ProxyError) as refused:
        AUDIO.read(raw, KIND, 0)
    assert refused.value.slug == "reserved_field"


def test_vllm_parses_the_forms_of_the_proxy(engine: TestClient) -> None:
    raw = b"--b\r\n" + SOUND
    for name, value in (("vllm_xargs", '{"a": 1}'), ("stream", "true"), ("prompt", "\u00e9")):
        head = f'\r\n--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
        raw += (head + value).encode()
    read, cuts, _ = AUDIO.read(raw + b"\r\n--b--\r\n", KIND, 0)
    reply = ask(engine, b"".join(AUDIO.encode_body(read, cuts)), AUDIO.content_type(read))

    assert reply.json() == {"prompt": "\u00e9", "unknown": [], "extra_args": {"a": 1}}


names = st.sampled_from([*RESERVED, "vllm_xargs", "vllm_xargs", "file", "model", "prompt", "n"])
json_values = st.sampled_from(
    [
        HARMFUL,
        b'{"a": 1}',
        b'{"a": 1, "ec_transfer_params": 0}',
        b'{"kv_transfer\\u005fparams": []}',
    ]
)
odd_values = st.sampled_from(
    [
        b"1",
        b"",
        b"\xff\xfe",
        b"x\r\n--b\r\nContent-Disposition: form-data; name=vllm_xargs\r\n\r\n" + HARMFUL,
        b"x\n--b\nContent-Disposition: form-data; name=vllm_xargs\n\n" + HARMFUL,
        b"x\r\n--b--\r\n",
        b"x\r\n--bb",
    ]
)
odd_spellings = st.sampled_from(
    [
        "form-data; name={0}",
        "form-data; NAME={0}",
        'form-data; name = "{0}"',
        'form-data; name="{0}"; filename="f"',
        'form-data; name="file"; filename="f"; name="{0}"',
        'form-data; name="file"; filename="f"; name*=utf-8\'\'{0}',
        'form-data; name="file"; filename="f\\"; name={0}; x=\\""',
        'form-data; name="file"; filename="f;name={0}"',
        'form-data; filename="\\\\"; name="{0}"',
        'form-data; name="file\\"; filename="f"; name="{0}"',
        "form-data; name='{0}'",
        "attachment; name={0}",
        "form-data; name*0=vllm_; name*1=xargs; name=file; filename=f",
    ]
)
headers = st.sampled_from(
    ["Content-Disposition", "content-disposition", "Content-Disposition ", "X"]
)
regular = st.sampled_from([True, True, True, True, False])


@st.composite
def part(draw: st.DrawFn) -> bytes:
    """Return a part with at most one oddity of each kind, and mostly none."""
    header = "Content-Disposition" if draw(regular) else draw(headers)
    spelling = 'form-data; name="{0}"' if draw(regular) else draw(odd_spellings)
    end = "\r\n" if draw(regular) else draw(st.sampled_from(["\n", "\r", "\r\n ", "\r\nX: y\r\n"]))
    value = draw(json_values if draw(regular) else odd_values)
    return f"{header}: {spelling.format(draw(names))}{end}\r\n".encode() + value


@st.composite
def body(draw: st.DrawFn) -> bytes:
    parts = draw(st.lists(part(), max_size=3))
    parts.insert(draw(st.integers(0, len(parts))), SOUND)
    odd_separators = st.sampled_from([b"\r\n--b \r\n", b"\n--b\n", b"\r\n--b--\r\n--b\r\n"])
    begin = b"" if draw(regular) else draw(st.sampled_from([b"\r\n", b"--c\r\n", b"x\r\n"]))
    raw = begin + b"--b\r\n" + parts[0]
    for one in parts[1:]:
        raw += (b"\r\n--b\r\n" if draw(regular) else draw(odd_separators)) + one
    end = (
        b"\r\n--b--\r\n" if draw(regular) else draw(st.sampled_from([b"\r\n--b--", b"\r\n--b\r\n"]))
    )
    return raw + end


kinds = st.sampled_from(
    [KIND] * 16
    + [
        'multipart/form-data; boundary="b"',
        "multipart/form-data; boundary=b; charset=utf-16",
        "multipart/form-data; boundary=c; boundary=b",
        "multipart/form-data; boundary*=utf-8''c; boundary=b",
        "Multipart/Form-Data;Boundary=b",
    ]
)


@pytest.mark.fault(74)
@pytest.mark.security("S5")
@settings(
    max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(raw=body(), content_type=kinds)
@example(raw=b"--b\r\n" + SOUND + b"\r\n--b--\r\n", content_type=KIND)
def test_accepted_forms_contain_no_reserved_field_for_vllm(
    engine: TestClient, raw: bytes, content_type: str
) -> None:
    try:
        read, cuts, _ = AUDIO.read(raw, content_type, 0)
    except ProxyError as refused:
        assert refused.status in {400, 415}
        return
    written = b"".join(AUDIO.encode_body(read, cuts))
    reply = ask(engine, written, AUDIO.content_type(read))

    if reply.status_code == 200:  # otherwise vLLM rejects the form, and no engine receives anything
        found = reply.json()
        assert found["unknown"] == []
        assert not set(RESERVED) & (found["extra_args"] or {}).keys()
