"""Forms: parsing, and the form that an instance receives."""

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.api.endpoints import ENDPOINTS
from epd.api.forms import MAX_HEAD_BYTES, MAX_PARTS, FormPart, MultipartForm, read_form
from epd.api.passthrough import MAX_FIELD_BYTES
from epd.errors import BadRequest, ProxyError

AUDIO = ENDPOINTS["/v1/audio/transcriptions"]
KIND = "multipart/form-data; boundary=b"
FILE = b'Content-Disposition: form-data; name="file"; filename="a.wav"'


def part(head: bytes, data: bytes = b"x") -> bytes:
    return b"--b\r\n" + head + b"\r\n\r\n" + data + b"\r\n"


def field(name: str, data: str | bytes = b"x") -> bytes:
    value = data if isinstance(data, bytes) else data.encode()
    return part(f'Content-Disposition: form-data; name="{name}"'.encode(), value)


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--b--\r\n"


def sent(raw: bytes | bytearray, content_type: str = KIND) -> dict[str, str | bytes]:
    """Return the fields that an instance finds in the form; bytes are the content of a file."""
    body, cuts, _ = AUDIO.read(raw, content_type, 0)
    written = b"".join(AUDIO.encode_body(body, cuts))
    parts = list(read_form(written, AUDIO.content_type(body)))
    assert len({part.name for part in parts}) == len(parts)
    return {part.name: part.text() if part.filename is None else bytes(part.data) for part in parts}


def refusal(raw: bytes, content_type: str = KIND) -> ProxyError:
    with pytest.raises(ProxyError) as refused:
        AUDIO.read(raw, content_type, 0)
    return refused.value


def test_a_form_is_parsed_and_rebuilt() -> None:
    sound = b"\0\xff--b\n--b\r\n--" * 1000
    raw = bytearray(form(part(FILE + b"\r\nContent-Type: audio/wav", sound), field("model", "m")))
    body, cuts, _ = AUDIO.read(raw, KIND, 0)
    written = AUDIO.encode_body(body, cuts)

    assert sent(raw) == {"file": sound, "model": "m"}
    assert body["model"] == "m"
    assert "boundary=b" not in AUDIO.content_type(body)
    assert b'filename="a.wav"\r\nContent-Type: audio/wav\r\n' in b"".join(written)
    # The sound is a view of the client's bytes, without a copy.
    assert any(isinstance(piece, memoryview) and piece.obj is raw for piece in written)


@pytest.mark.parametrize("name", ["ünï.wav", 'a"b\\c.wav', "a" * 300 + ".wav"])
def test_a_form_is_read_with_any_file_name(name: str) -> None:
    request = httpx.Request(
        "POST",
        "http://epd",
        data={"model": "m", "language": "en", "prompt": "é\r\nè"},
        files={"file": (name, b"sound", "audio/wav; codecs=1")},
    )

    fields = sent(request.read(), request.headers["Content-Type"])

    assert fields == {"model": "m", "language": "en", "prompt": "é\r\nè", "file": b"sound"}


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        ('Multipart/Form-Data; charset=utf-8; Boundary="b"', form(part(FILE))),
        (KIND, form(part(FILE.replace(b'"', b"")))),  # tokens, as .NET writes them
        (KIND, form(part(FILE + b"; filename*=utf-8''b.wav"))),
        (KIND, form(part(FILE.replace(b"Content-D", b"content-d").replace(b"; ", b";")))),
        (KIND, b"\r\n" + form(part(FILE))),
        (KIND, form(part(FILE.replace(b"a.wav", b"")))),
        (KIND, form(part(FILE)).removesuffix(b"\r\n")),
        (KIND, form(part(FILE)) + b"\r\n"),
        (KIND, form(part(b"Content-Transfer-Encoding: binary\r\n" + FILE))),
    ],
)
def test_spellings_that_clients_use_are_read(kind: str, raw: bytes) -> None:
    assert sent(raw, kind) == {"file": b"x"}


@pytest.mark.fault(74)
@pytest.mark.security("S5")
@pytest.mark.parametrize("value", ["{}", "0", "", "null", '{"do_remote_prefill": true}'])
@pytest.mark.parametrize("reserved", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("suffix", ["", "[]", "[do_remote_prefill]"])
def test_a_reserved_field_of_a_form_is_refused(reserved: str, value: str, suffix: str) -> None:
    error = refusal(form(part(FILE), field(reserved + suffix, value)))

    assert (error.status, error.slug, error.param) == (400, "reserved_field", reserved)


@pytest.mark.fault(74)
@pytest.mark.security("S5")
@pytest.mark.parametrize("value", ['""', "0", "[]", "null", "{}", '{"a": 1}'])
@pytest.mark.parametrize("reserved", ["kv_transfer_params", "ec_transfer_params"])
def test_a_reserved_field_in_a_forms_extra_arguments_is_refused(reserved: str, value: str) -> None:
    hidden = reserved.replace("_", "\\u005f")
    for name in (reserved, hidden):
        xargs = f'{{"a": 1, "{name}": {value}, "b": 2}}'
        error = refusal(form(field("vllm_xargs", xargs), part(FILE)))

        assert (error.status, error.slug) == (400, "reserved_field")
        assert error.param == f"vllm_xargs.{reserved}"


@pytest.mark.fault(74)
@pytest.mark.parametrize(
    "xargs", ["", "{", "[]", '"kv_transfer_params"', "0", "NaN", "[" * 200 + "]" * 200]
)
def test_extra_arguments_of_a_form_must_be_an_object(xargs: str) -> None:
    error = refusal(form(part(FILE), field("vllm_xargs", xargs)))

    assert (error.status, error.param) == (400, "vllm_xargs")


def test_extra_arguments_of_a_form_are_rebuilt() -> None:
    fields = sent(form(part(FILE), field("vllm_xargs", ' {"a": 1, "a" : ["b", 2.5]} ')))

    assert json.loads(fields["vllm_xargs"]) == {"a": ["b", 2.5]}


@pytest.mark.fault(74)
@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ((part(FILE), field("unheard_of")), "unheard_of"),
        ((part(FILE), field("vllm_xargs[kv_transfer_params]", "1")), "vllm_xargs[kv_transfer_para"),
        ((part(FILE), field("Model", "m")), "Model"),
        ((part(FILE), field("model", "m"), field("model", "n")), "model"),
        ((part(FILE), part(FILE)), "file"),
        ((field("file"),), "file"),
        ((part(FILE.replace(b'"file"', b'"prompt"')),), "prompt"),
        ((part(FILE), field("prompt", b"\xff")), "prompt"),
        ((part(FILE), field("prompt", "x" * (MAX_FIELD_BYTES + 1))), "prompt"),
    ],
)
def test_a_field_that_no_instance_may_get_is_refused_by_name(
    parts: tuple[bytes, ...], param: str
) -> None:
    error = refusal(form(*parts))

    assert error.status == 400
    assert (error.param or "").startswith(param)


def test_a_field_has_at_most_a_mebibyte() -> None:
    assert len(sent(form(part(FILE), field("prompt", "x" * MAX_FIELD_BYTES)))["prompt"]) == 2**20


def test_fields_that_vllm_ignores_are_dropped() -> None:
    ignored = [
        field("chunking_strategy", "auto"),
        field("chunking_strategy[type]", "server_vad"),
        field("include[]", "logprobs"),
        field("known_speaker_references[]", "data:audio/wav;base64,AAAA"),
        field("conversation_id", "c"),
    ]

    assert sent(form(part(FILE), *ignored)) == {"file": b"x"}


def test_a_list_keeps_all_of_its_values() -> None:
    name = "timestamp_granularities[]"
    body, *_ = AUDIO.read(form(part(FILE), field(name, "word"), field(name, "segment")), KIND, 0)

    assert [one.text() for one in body["form"].parts if one.name == name] == ["word", "segment"]


@pytest.mark.fault(74)
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"x",
        b"--b",
        b"--b\r\n",
        b"--b--\r\nx",
        b"x\r\n" + form(part(FILE)),
        part(FILE),
        form(part(FILE)) + part(FILE),
        form(b"--b \r\n" + part(FILE)[5:]),
        form(b"--b\n" + part(FILE)[5:]),
        form(b"--bb\r\n" + part(FILE)[5:]),
        form(part(FILE, b"x\r\n--bb")),
        form(part(b"")),
        form(part(b"Content-Type: text/plain")),
        form(part(b"Content-Disposition: form-data")),
        form(part(b"Content-Disposition: attachment; name=file; filename=a")),
        form(part(FILE + b"\r\n" + FILE)),
        form(part(FILE + b"; name=vllm_xargs")),
        form(part(FILE + b"; NAME=vllm_xargs")),
        form(part(FILE + b"\r\n folded")),
        form(part(FILE + b"\nX: y")),
        form(part(b"X : y\r\n" + FILE)),
        form(part(FILE + b'; x="')),
        form(part(FILE + b"\r\nX: \0")),
    ],
)
def test_a_malformed_form_is_refused(raw: bytes) -> None:
    error = refusal(raw)

    assert (error.status, error.slug) == (400, "invalid_form")


def test_a_form_without_a_file_is_left_to_the_instance() -> None:
    assert sent(form(field("model", "m"))) == {"model": "m"}
    assert sent(form()) == {}


def test_the_number_of_parts_is_bounded() -> None:
    name = "timestamp_granularities[]"
    most = [field(name, "word")] * MAX_PARTS
    body, *_ = AUDIO.read(form(*most), KIND, 0)

    assert len(body["form"].parts) == MAX_PARTS
    assert refusal(form(*most, field(name, "word"))).slug == "invalid_form"


def test_the_headers_of_a_part_are_bounded() -> None:
    # The line end before the headers and the empty line after them count.
    filler = b"\r\nX: " + b"x" * (MAX_HEAD_BYTES - len(FILE) - len(b"\r\n\r\nX: \r\n\r\n"))

    assert sent(form(part(FILE + filler))) == {"file": b"x"}
    assert refusal(form(part(FILE + filler + b"x"))).slug == "invalid_form"


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        "multipart/form-data; boundary=b; boundary=c",
        "multipart/form-data; boundary=b; BOUNDARY=c",
        "multipart/form-data; boundary*=utf-8''b",
        "multipart/form-data; boundary=" + "b" * 71,
        'multipart/form-data; boundary="b',
        "multipart/form-data, boundary=b",
        "multipart/mixed; boundary=b",
        "application/x-www-form-urlencoded",
        "x; boundary=y",
    ],
)
def test_an_invalid_form_is_rejected(kind: str) -> None:
    error = refusal(form(part(FILE)), kind)

    assert (error.status, error.slug) == (415, "unsupported_media_type")


texts = st.text(st.characters(codec="utf-8"), max_size=40)


@given(data=st.binary(max_size=300), name=texts, prompt=texts)
def test_a_written_form_can_be_read_back(data: bytes, name: str, prompt: str) -> None:
    parts = [FormPart("file", data, name), FormPart("prompt", prompt.encode())]
    form = MultipartForm(tuple(parts))
    raw = b"".join(form.pieces())

    assert [
        (part.name, bytes(part.data), part.filename is None)
        for part in read_form(raw, form.content_type)
    ] == [("file", data, False), ("prompt", prompt.encode(), True)]


@given(raw=st.binary(max_size=200), kind=st.sampled_from([KIND, 'multipart/form-data; boundary="']))
def test_any_bytes_are_a_form_or_are_refused(raw: bytes, kind: str) -> None:
    for body in (raw, b"--b\r\n" + raw, form(part(FILE, raw)), form(part(raw))):
        try:
            AUDIO.read(body, kind, 0)
        except ProxyError as error:
            assert error.status in {400, 415}


@pytest.mark.security("S5")
@pytest.mark.parametrize("xargs", ["", 0, [], "kv_transfer_params", ["ec_transfer_params"], True])
@pytest.mark.parametrize("path", [path for path in ENDPOINTS if "audio" not in path])
def test_extra_arguments_of_a_json_body_are_an_object(path: str, xargs: object) -> None:
    body = {"messages": [], "input": "x", "vllm_xargs": xargs}
    with pytest.raises(BadRequest) as refused:
        ENDPOINTS[path].parse(json.dumps(body).encode())

    assert refused.value.param == "vllm_xargs"
