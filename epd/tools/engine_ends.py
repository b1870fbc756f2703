"""Causes of an engine's end that its log names in other words. No I/O."""

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


def end_cause(log: str) -> str | None:
    """Return what ended an engine, and what to change; None: its log has no known words."""
    return next((cause for words, cause in MEMORY_CAUSES.items() if words in log), None)
