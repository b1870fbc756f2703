"""Names that the proxy shares with vLLM's server, compared with vLLM's own."""

import importlib
import json
import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from epd.api.endpoints import ENDPOINTS
from epd.api.passthrough import SCORED
from epd.edge.engine_headers import LOAD_FORMAT, PRIORITY, SESSION
from epd.errors import BadRequest
from epd.server.app import ROUTES
from tests.paths import ROOT

pytestmark = pytest.mark.full

LONE = rb'{"model": "m", "messages": [{"role": "user", "content": "a\ud83d"}]}'
"""Chat with half of a surrogate pair, as in a string that was cut inside an emoji."""


def loaded(name: str) -> Any:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: scripts/test.sh installs it")
    with warnings.catch_warnings(action="ignore"):
        return importlib.import_module(f"vllm.entrypoints.{name}")


def test_headers_have_vllms_names() -> None:
    serving = loaded("generate.base.serving")
    routes = [loaded(f"openai.{name}.api_router") for name in ("chat_completion", "completion")]

    assert (serving.SESSION_ID_HEADER, serving.PRIORITY_HEADER) == (SESSION, PRIORITY)
    assert {one.ENDPOINT_LOAD_METRICS_FORMAT_HEADER_LABEL for one in routes} == {LOAD_FORMAT}


ROUTE = re.compile(
    r'(?:@\w+\.(?:get|post|put|patch|delete|websocket|api_route)|add_api_route)\(\s*"(/[^"]+)"'
)


def test_every_route_of_vllm_is_served_or_listed_as_excluded() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed: scripts/test.sh installs it")
    files = (Path(spec.origin).parent / "entrypoints").rglob("*.py")
    server = [file for file in files if file.name != "dp_supervisor.py"]  # a server of its own
    theirs = {path for file in server for path in ROUTE.findall(file.read_text())}
    document = (ROOT / "docs" / "endpoints.md").read_text()
    section = document.partition("\n## What stays out\n")[2]
    out = "\n".join(line for line in section.splitlines() if line.startswith("| "))
    left_out = {
        path for code in re.findall(r"`([^`]+)`", out) for path in re.findall(r"/\S+", code)
    }
    served = {route.path for _, route in ROUTES}

    assert len(theirs) > len(ENDPOINTS)
    assert theirs - served - left_out == set()
    assert left_out & ENDPOINTS.keys() == {
        "/v1/chat/completions"
    }  # the endpoint to use instead of Cohere's


def test_every_field_that_vllm_compares_is_checked() -> None:
    protocol = loaded("pooling.scoring.protocol")
    requests = (*get_args(protocol.ScoreRequest), protocol.RerankRequest)
    compared = {
        name
        for request in requests
        for name, field in request.model_fields.items()
        if "ScoreMultiModalParam" in str(field.annotation)
    }

    assert compared == set(SCORED)


def test_every_field_of_coheres_that_has_images_is_checked() -> None:
    fields = loaded("pooling.embed.protocol").CohereEmbedRequest.model_fields
    others = {"model", "input_type", "texts", "output_dimension", "embedding_types", "truncate"}

    assert fields.keys() == {"images", "inputs", "max_tokens", "priority", *others}


def test_vllm_reads_half_a_surrogate_pair_and_refuses_it_when_it_tokenizes() -> None:
    """Clients of vLLM get a 400 too, so the proxy's 400 for the body differs only in its text."""
    app, read = FastAPI(), []
    request = loaded("openai.chat_completion.protocol").ChatCompletionRequest

    async def chat(body: Any) -> None:
        read.append(body.messages[0]["content"])

    chat.__annotations__["body"] = request
    app.post("/")(chat)
    answer = TestClient(app).post("/", content=LONE, headers={"Content-Type": "application/json"})
    assert (answer.status_code, read) == (200, json.loads(b'["a\\ud83d"]'))

    with pytest.raises(TypeError) as refused:
        Tokenizer(WordLevel({"a": 0}, unk_token="a")).encode(read[0])
    error = loaded("serve.exception_handling.error_response").create_error_response(refused.value)
    assert error.error.code == 400

    with pytest.raises(BadRequest) as ours:
        ENDPOINTS["/v1/chat/completions"].parse(LONE)
    assert (ours.value.status, ours.value.slug) == (400, "invalid_json")
