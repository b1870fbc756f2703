"""Endpoint picker: an HTTP service that chooses the decode instance of a request.

The proxy sends `{"model", "request_id", "endpoint", "prompt_tokens", "items", "prefill",
"candidates", "tried"}` by `POST`. The answer is `{"url": "http://host:port"}`
(docs/guides/policies.md).
"""

from collections.abc import Iterable

import orjson

from epd.errors import ProxyError, UpstreamFailed, UpstreamTimeout, UpstreamUnreachable
from epd.policies.course import Facts
from epd.request.context import RequestContext
from epd.routing.instances import Instance
from epd.upstream.client import Upstream


class Picker:
    """The client of the configured endpoint picker."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def ask(
        self,
        facts: Facts,
        context: RequestContext,
        prefill: Instance | None,
        candidates: Iterable[Instance],
        tried: Iterable[Instance],
    ) -> str:
        """Return the picker's choice: the base URL of an instance, or its `host:port`.

        Args:
            facts: facts of the request.
            context: context of the request. The picker receives none of the client's headers.
            prefill: the instance of its prefill; None without prefill.
            candidates: decode instances among which the proxy would choose.
            tried: decode instances that have failed.

        Raises:
            ProxyError: the picker failed, or its answer names no instance.
        """
        question = {
            "model": context.model,
            "request_id": context.request_id,
            "endpoint": facts.path,
            "prompt_tokens": facts.prompt_tokens,
            "items": facts.items,
            "prefill": None if prefill is None else prefill.url,
            "candidates": [one.url for one in candidates],
            "tried": [one.url for one in tried],
        }
        try:
            answer = await self._upstream.fetch(
                str(context.config.decode_picker_url),
                stage="decode",
                headers={"Content-Type": "application/json", "X-Request-Id": context.request_id},
                body=(orjson.dumps(question),),
                timeout_s=context.config.decode_picker_timeout_s,
            )
        except (UpstreamFailed, UpstreamTimeout) as error:  # their messages name an instance
            raise _useless(f"the endpoint picker{_fault(error)}") from error
        if not answer.ok:
            raise _useless(f"it answered {answer.status}")
        try:
            match orjson.loads(answer.body):
                case {"url": str() as url}:
                    return url
                case _:
                    raise _useless("its answer has no url")
        except orjson.JSONDecodeError:
            raise _useless("its answer is not JSON") from None


def _fault(error: ProxyError) -> str:
    if isinstance(error, UpstreamTimeout):
        return " did not answer in time"
    if isinstance(error, UpstreamUnreachable):
        return " is unreachable"
    return "'s answer was cut off, is too large or has an unsupported encoding"


def _useless(reason: str) -> ProxyError:
    return UpstreamFailed(reason, slug="decode_picker", stage="decode")
