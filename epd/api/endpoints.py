"""All endpoints, by their route."""

from collections.abc import Mapping

from epd.api import passthrough
from epd.api.chat import CHAT
from epd.api.completions import Completions
from epd.api.endpoint import Endpoint
from epd.api.messages import CountTokens, Messages
from epd.api.responses import Responses

ENDPOINTS: Mapping[str, Endpoint] = {
    endpoint.path: endpoint
    for endpoint in (
        CHAT,
        Completions(),
        Responses(),
        Messages(),
        CountTokens(),
        passthrough.Embeddings("/v1/embeddings"),
        passthrough.Tokenize("/tokenize"),
        passthrough.Detokenize("/detokenize"),
        passthrough.Score("/score"),
        passthrough.Score("/v1/score"),
        passthrough.Score("/rerank"),
        passthrough.Score("/v1/rerank"),
        passthrough.Score("/v2/rerank"),
        passthrough.Pooling("/pooling"),
        passthrough.Classify("/classify"),
        passthrough.CohereEmbed("/v2/embed"),
        passthrough.Transcriptions("/v1/audio/transcriptions"),
        passthrough.Transcriptions("/v1/audio/translations"),
    )
}


def is_api(route: str) -> bool:
    """Return whether a route belongs to the API: its requests are logged, shown and traced.

    Health, metrics and unknown routes do not belong to it.
    """
    return route in ENDPOINTS or route.startswith("/v1/")
