"""Causes of an engine's end, from its log. No I/O."""

import re

MEMORY_CAUSES = {
    "No available memory for the cache blocks": (
        "its share of the device is too small for the model, or another process allocated memory "
        "of the device while it measured what is left: vLLM counts that as its own. Start the "
        "instances of a device one after another, as `epd up` does, or see "
        "--gpu-memory-utilization"
    ),
    "Error in memory profiling": (
        "another process released memory of the device while it measured what is left. Start the "
        "instances of a device one after another, as `epd up` does, and end none meanwhile"
    ),
}
"""Causes by words that vLLM logs (`_check_enough_kv_cache_memory`, `vllm/v1/core/`;
`Worker.determine_available_memory`, `vllm/v1/worker/gpu_worker.py`)."""


FATAL = re.compile(r"EngineCore (encountered a fatal error|failed to start)\.$")
"""End of the line before the traceback of what ended an engine (`run_engine_core`,
`vllm/v1/engine/core.py`)."""

# A data-parallel engine is EngineCore_DP0.
TRACEBACK = re.compile(r"\(EngineCore[^)]*\) ERROR [^\[]*\[[^\]]*\] (.*)")


def end_cause(log: str) -> str | None:
    """Return what ended an engine, and what to change if that is known; None: its log has neither.

    A server that loses its engine logs much more before it ends, with exit code 0.
    """
    known = next((cause for words, cause in MEMORY_CAUSES.items() if words in log), None)
    lines = iter(log.splitlines())
    if known is not None or not any(FATAL.search(line) for line in lines):
        return known
    raised = None
    for text in (match[1] for line in lines if (match := TRACEBACK.match(line))):
        if text.startswith("Traceback "):
            raised = None
        elif raised is None and not text.startswith(" "):
            raised = text
    return None if raised is None else f"its engine failed: {raised}"
