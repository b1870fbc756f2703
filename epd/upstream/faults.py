"""Conversion of connection errors to errors of a stage."""

import errno

from epd.errors import (
    Overloaded,
    ProxyError,
    Stage,
    UpstreamDied,
    UpstreamFailed,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from epd.http.connection import Broken, Died, Unreachable

OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

FAILURES = (Unreachable, Broken, TimeoutError)
"""Errors that `epd.http.connection` raises."""


def shown(
    error: Exception,
    stage: Stage,
    *,
    broken: str,
    late: str | None = None,
    computed: bool = False,
) -> ProxyError:
    """Return the error of a stage. Addresses remain in the cause, which clients do not see.

    Args:
        error: one of `FAILURES`.
        stage: stage of the instance.
        broken: slug of a broken connection.
        late: slug of a timeout; None for the stage's.
        computed: whether the instance had computed its answer, and so survived the request.
    """
    instance = "the instance" if stage == "proxy" else f"the {stage} instance"
    if isinstance(error, TimeoutError):
        return UpstreamTimeout(
            f"{instance} did not answer in time",
            slug=late or f"{stage}_timeout",
            stage=stage,
        )
    reason = cause(error)
    if isinstance(reason, OSError) and reason.errno in OUT_OF_DESCRIPTORS:
        # The limit of this process, not a failure of the instance.
        return Overloaded("the proxy has too many open connections", stage=stage)
    if isinstance(error, Broken):
        kind = UpstreamDied if isinstance(error, Died) and not computed else UpstreamFailed
        return kind(f"the connection to {instance} broke", slug=broken, stage=stage)
    return UpstreamUnreachable(f"{instance} is unreachable", slug=broken, stage=stage)


def cause(error: Exception) -> BaseException:
    """Return the underlying error of a connection's own error."""
    return error.__cause__ or error
