"""What goes wrong between the proxy and an instance, as errors that are answered."""

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
"""What `epd.http.connection` raises."""


def shown(
    error: Exception,
    stage: Stage,
    *,
    broken: str,
    late: str | None = None,
    computed: bool = False,
) -> ProxyError:
    """Return what a connection's error means. Addresses stay in the cause, which is not shown.

    Args:
        error: one of `FAILURES`.
        stage: the stage of the instance.
        broken: slug of a connection that broke.
        late: slug of a time-out; None: the stage's.
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
        # Ours, not the instance's.
        return Overloaded("too many connections are open", stage=stage)
    if isinstance(error, Broken):
        kind = UpstreamDied if isinstance(error, Died) and not computed else UpstreamFailed
        return kind(f"the connection to {instance} broke", slug=broken, stage=stage)
    return UpstreamUnreachable(f"{instance} cannot be reached", slug=broken, stage=stage)


def cause(error: Exception) -> BaseException:
    """What it is due to: of a connection's own errors, what they came of."""
    return error.__cause__ or error
