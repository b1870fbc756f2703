"""Tracing as configured. OpenTelemetry, an optional dependency, is imported with an endpoint."""

from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING

from epd.config.sections.serving import ServingSettings

if TYPE_CHECKING:
    from epd.spans import Tracer


class TracesUnavailable(Exception):
    """Error: traces are configured and cannot be exported. The text has the reason."""


def check_tracing(config: ServingSettings) -> None:
    """Check at startup that traces can be exported.

    Raises:
        TracesUnavailable: OpenTelemetry is missing, or its settings are invalid.
    """
    if config.otlp_traces_endpoint is None:
        return
    try:
        from epd.observe.otel import protocol  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise TracesUnavailable(
            f"--otlp-traces-endpoint needs pip install 'epd-proxy[otel]': {error}"
        ) from error
    try:
        protocol()
    except ValueError as error:
        raise TracesUnavailable(str(error)) from error


def tracing(config: ServingSettings) -> "AbstractAsyncContextManager[Tracer | None]":
    """Return a context that exports spans until it is left; its value is None without an endpoint.

    Raises:
        TracesUnavailable: OpenTelemetry is missing, or its settings are invalid.
    """
    if config.otlp_traces_endpoint is None:
        return nullcontext()
    check_tracing(config)
    from epd.observe.otel import exporting  # noqa: PLC0415 - as above

    return exporting(config.otlp_traces_endpoint)
