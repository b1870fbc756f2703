"""vLLM's own spans join those of the proxy."""

import time
from typing import Any

from tests.collector import Span
from tests.e2e.asking import unseen
from tests.e2e.served import Served
from tests.requests import text

STAGES = ["encode", "prefill", "decode"]


def of_engines(stack: Served, children: list[Span]) -> dict[str, list[Span]]:
    """Return vLLM's spans below each of the proxy's."""
    return {child.name: stack.collector.children(child) for child in children}


def test_every_engines_span_is_a_child_of_the_request_that_it_was_sent(stack: Served) -> None:
    messages: Any = [{"role": "user", "content": [unseen(stack), text()]}]
    answer = stack.client.chat.completions.with_raw_response.create(
        model=stack.model, messages=messages, max_tokens=4
    )
    trace_id = answer.headers["x-trace-id"]
    deadline = time.monotonic() + 30
    while True:
        roots = [span for span in stack.collector.roots if span.trace_id == trace_id]
        ours = [span for span in roots if span.service == "epd-proxy"]
        children = stack.collector.children(ours[0]) if ours else []
        below = of_engines(stack, children)
        if all(below.get(stage) for stage in STAGES):
            break
        assert time.monotonic() < deadline, below
        time.sleep(0.1)

    [store, *stages] = children
    assert store.name == "store"
    assert [span.name for span in stages] == STAGES
    for stage in stages:
        [span] = below[stage.name]
        assert (span.name, span.kind) == ("llm_request", "SERVER")
        assert span.service != "epd-proxy"
        assert stage.start_ns <= span.start_ns <= span.end_ns
