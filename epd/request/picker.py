"""An endpoint picker: a service that is asked over HTTP who decodes a request.

It is sent `{"model", "request_id", "endpoint", "prompt_tokens", "items", "prefill", "candidates",
"tried"}` by `POST`, and answers `{"url": "http://host:port"}` (docs/guides/policies.md).
"""

from collections.abc import Iterable

import orjson

from epd.errors import ProxyError, UpstreamFailed, UpstreamTimeout, UpstreamUnreachable
from epd.policies.course import Facts
from epd.request.context import RequestContext
from epd.routing.instances import Instance
from epd.upstream.client import Upstream


class Picker:
    """The one that is configured."""

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
        """What it names: an instance's base URL, or its `host:port`.

        Args:
            facts: of the request.
            context: the request's. The picker sees none of its client's headers.
            prefill: who has prefilled it, or will; None: nobody.
            candidates: the decode instances that the proxy would choose among.
            tried: those that have failed.

        Raises:
            ProxyError: it names none.
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
        except (UpstreamFailed, UpstreamTimeout) as error:  # their words are of an instance
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
            raise _useless("its answer is no JSON") from None


def _fault(error: ProxyError) -> str:
    if isinstance(error, UpstreamTimeout):
        return " did not answer in time"
    if isinstance(error, UpstreamUnreachable):
        return " cannot be reached"
    return "'s answer broke off, is too large or has an encoding that was not asked for"


def _useless(reason: str) -> ProxyError:
    return UpstreamFailed(reason, slug="decode_picker", stage="decode")
