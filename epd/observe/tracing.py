"""Traces, where they are wanted: OpenTelemetry is an extra, imported only then."""

from contextlib import AbstractAsyncContextManager, nullcontext

from epd.config import ProxyConfig
from epd.spans import Tracer


class TracesUnavailable(Exception):
    """Traces are wanted and cannot be had; its text says why."""


def check_tracing(config: ProxyConfig) -> None:
    """Find out at the start.

    Raises:
        TracesUnavailable: OpenTelemetry is missing, or its own settings are wrong.
    """
    if config.otlp_traces_endpoint is None:
        return
    try:
        from epd.observe.otlp import protocol  # noqa: PLC0415 - an extra, and not a light one
    except ImportError as error:
        raise TracesUnavailable(
            f"--otlp-traces-endpoint needs pip install 'epd-proxy[otel]': {error}"
        ) from error
    try:
        protocol()
    except ValueError as error:
        raise TracesUnavailable(str(error)) from error


def tracing(config: ProxyConfig) -> AbstractAsyncContextManager[Tracer | None]:
    """Makes spans, which are exported until the context is left; None where none are wanted.

    Raises:
        TracesUnavailable: they cannot be had.
    """
    if config.otlp_traces_endpoint is None:
        return nullcontext()
    check_tracing(config)
    from epd.observe.otlp import exporting  # noqa: PLC0415 - as above

    return exporting(config.otlp_traces_endpoint)
