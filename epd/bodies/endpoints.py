"""All endpoints, by their route."""

from collections.abc import Mapping

from epd.bodies.chat import CHAT
from epd.bodies.completions import Completions
from epd.bodies.endpoint import Endpoint
from epd.bodies.messages import CountTokens, Messages
from epd.bodies.passed_on import (
    Detokenize,
    Embeddings,
    Tokenize,
    Transcriptions,
    Translations,
)
from epd.bodies.responses import Responses

ENDPOINTS: Mapping[str, Endpoint] = {
    endpoint.path: endpoint
    for endpoint in (
        CHAT,
        Completions(),
        Responses(),
        Messages(),
        CountTokens(),
        Embeddings(),
        Tokenize(),
        Detokenize(),
        Transcriptions(),
        Translations(),
    )
}
