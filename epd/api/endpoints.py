"""All endpoints, by their route."""

from collections.abc import Mapping

from epd.api.chat import CHAT, Completions, Responses
from epd.api.endpoint import Endpoint
from epd.api.messages import CountTokens, Messages
from epd.api.passthrough import (
    Classify,
    CohereEmbed,
    Detokenize,
    Embeddings,
    Pooling,
    Rerank,
    Score,
    Tokenize,
    Transcriptions,
)

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
        Score("/score"),
        Score("/v1/score"),
        Rerank("/rerank"),
        Rerank("/v1/rerank"),
        Rerank("/v2/rerank"),
        Pooling(),
        Classify(),
        CohereEmbed(),
        Transcriptions("/v1/audio/transcriptions"),
        Transcriptions("/v1/audio/translations"),
    )
}


def is_api(route: str) -> bool:
    """Return whether a route belongs to the API: its requests are logged, shown and traced.

    Health, metrics and unknown routes do not belong to it.
    """
    return route in ENDPOINTS or route.startswith("/v1/")
