"""Endpoint picker: an HTTP service that chooses decode instances.

The proxy sends it `{"model", "request_id", "endpoint", "prompt_tokens", "items", "prefill",
"candidates", "tried"}` by `POST`. The answer is `{"url": "http://host:port"}`
(docs/guides/policies.md).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import orjson

from epd.api.prompts import prompt_tokens
from epd.errors import ProxyError, UpstreamFailed, UpstreamTimeout, UpstreamUnreachable
from epd.request.request import Request
from epd.routing.instances import Instance
from epd.upstream import Upstream


@dataclass(frozen=True, slots=True, eq=False)
class Picker:
    """Client of the configured endpoint picker."""

    _upstream: Upstream

    async def ask_picker(
        self,
        request: Request,
        prefill: Instance | None,
        candidates: Iterable[Instance],
        tried: Iterable[Instance],
    ) -> str:
        """Return the picker's choice: the base URL of an instance, or its `host:port`.

        `candidates` are the decode instances among which the proxy would choose; the `tried` ones
        have failed. The picker receives none of the client's headers.

        Raises:
            ProxyError: the picker failed, or its answer names no instance.
        """
        question = {
            "model": request.body.get("model"),
            "request_id": request.id,
            "endpoint": request.endpoint.path,
            "prompt_tokens": prompt_tokens(request.body),
            "items": len(request.items),
            "prefill": None if prefill is None else prefill.url,
            "candidates": [instance.url for instance in candidates],
            "tried": [instance.url for instance in tried],
        }
        try:
            answer = await self._upstream.fetch(
                str(request.config.decode_picker_url),
                stage="decode",
                headers={"Content-Type": "application/json", "X-Request-Id": request.id},
                body=(orjson.dumps(question),),
                timeout_s=request.config.decode_picker_timeout_s,
            )
        # The messages of these errors name an instance.
        except UpstreamTimeout as error:
            raise _picker_failed("the endpoint picker did not answer in time") from error
        except UpstreamUnreachable as error:
            raise _picker_failed("the endpoint picker is unreachable") from error
        except UpstreamFailed as error:
            fault = "was cut off, is too large or has an unsupported encoding"
            raise _picker_failed(f"the endpoint picker's answer {fault}") from error
        if not answer.ok:
            raise _picker_failed(f"it answered {answer.status}")
        try:
            match orjson.loads(answer.body):
                case {"url": str() as url}:
                    return url
                case _:
                    raise _picker_failed("its answer has no url")
        except orjson.JSONDecodeError:
            raise _picker_failed("its answer is not JSON") from None


def _picker_failed(reason: str) -> ProxyError:
    return UpstreamFailed(reason, slug="decode_picker", stage="decode")
