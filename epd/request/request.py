"""A client's request, as the server read it, with its id and its media in memory.

Ids of requests for instances, logs and traces only distinguish requests. They are no secrets and
need no system call for secure randomness.
"""

import itertools
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from epd.api.body import JSON, Cuts
from epd.api.chat import CHAT
from epd.api.endpoint import Endpoint
from epd.api.items import Body, MMItem
from epd.config.sections import ConfigFields
from epd.conversations.turn import Turn
from epd.edge.engine_headers import SESSION
from epd.media.memory_count import MemoryCount
from epd.request.recorder import Recorder
from epd.routing.doubts import Doubts
from epd.routing.fatal import Watched
from epd.tenants import ANONYMOUS, Tenant

if TYPE_CHECKING:
    from epd.spans import Span


# A generator of its own: other code in the process may seed the module's one, and then two proxies
# would generate equal ids.
_NUMBERS = random.Random()  # noqa: S311 - no secret
os.register_at_fork(after_in_child=_NUMBERS.seed)


def request_id(client_id: str | None) -> str:
    """Return a unique id that begins with the client's id, so that a search for that id finds it.

    A client may use one id twice at the same time. An engine or a KV connector that identifies
    requests by the id would confuse two such requests.
    """
    return _hex(16) if client_id is None else f"{client_id}-{_hex(4)}"


def _hex(size_bytes: int) -> str:
    return f"{_NUMBERS.getrandbits(8 * size_bytes):0{2 * size_bytes}x}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Request:
    """A client's request, made once its body is read.

    Attributes:
        id: id that the instances see, unique for each request.
        headers: headers for the instances, without the request id.
        config: the configuration.
        endpoint: the requested endpoint.
        body: the body, with marks in the places of its media.
        items: its media items, in order.
        text_bytes: size of the body as received, without its media.
        tenant: owner of the request.
        clients_key: whether the instances receive the client's own key, and not the proxy's.
        client_headers: all headers of the client, case-insensitive.
        session: affinity key shared with related requests; empty for none.
        turn: the conversation turn; None for a request outside a conversation.
        cuts: media cut out of its body; they are put back into the bodies for instances.
        memory: counter of its bytes in memory.
        record: record of its progress.
        watched: its state for counting deaths of instances.
        doubts: its 500s.
    """

    id: str
    headers: Mapping[str, str]
    config: ConfigFields
    endpoint: Endpoint = CHAT
    body: Body = field(default_factory=dict)
    items: Sequence[MMItem] = ()
    text_bytes: int = 0
    tenant: Tenant = ANONYMOUS
    clients_key: bool = True
    client_headers: Mapping[str, str] = field(default_factory=dict)
    session: str = ""
    turn: Turn | None = None
    cuts: Cuts = field(default_factory=dict)
    memory: MemoryCount = field(default_factory=MemoryCount)
    record: Recorder = field(default_factory=lambda: Recorder("", "POST", ""))
    watched: Watched = field(default_factory=Watched)
    doubts: Doubts = field(default_factory=Doubts)
    _children: Iterator[int] = field(default_factory=itertools.count)

    @property
    def is_spent(self) -> bool:
        """Whether no instance may get the request again, because it kills them or fails on all."""
        return self.watched.is_spent or self.doubts.is_spent

    def child_id(self) -> str:
        """Return an id for a request that the proxy makes on behalf of this one."""
        return f"{self.id}:{next(self._children)}:{_hex(3)}"

    def headers_for(
        self,
        request_id: str,
        span: "Span | None" = None,
        rank: int | None = None,
        content_type: str = JSON,
        *,
        mark: str = "",
    ) -> dict[str, str]:
        """Return the headers of one request to an instance, or to one of its data-parallel ranks.

        The spans of the instance become children of `span`. A mark replaces the client's session.
        """
        headers = {**self.headers, "Content-Type": content_type, "X-Request-Id": request_id}
        if mark:
            headers[SESSION] = mark
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        return headers if span is None else {**headers, **span.headers}
