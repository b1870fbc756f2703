"""What goes wrong between the proxy and an instance, as errors that are answered."""

import errno

from epd.errors import (
    Overloaded,
    ProxyError,
    Stage,
    UpstreamFailed,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from epd.http.connection import Broken, Unreachable

OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

FAILURES = (Unreachable, Broken, TimeoutError)
"""What `epd.http.connection` raises."""


def shown(error: Exception, stage: Stage, *, broken: str, late: str | None = None) -> ProxyError:
    """What a connection's errors mean. Addresses stay in the cause, which is not shown."""
    instance = "the instance" if stage == "proxy" else f"the {stage} instance"
    if isinstance(error, TimeoutError):
        return UpstreamTimeout(
            f"{instance} did not answer in time",
            slug=late or f"{stage}_timeout",
            stage=stage,
        )
    if isinstance(error, Broken):
        return UpstreamFailed(f"the connection to {instance} broke", slug=broken, stage=stage)
    reason = cause(error)
    if isinstance(reason, OSError) and reason.errno in OUT_OF_DESCRIPTORS:
        # Ours, not the instance's.
        return Overloaded("too many connections are open", stage=stage)
    return UpstreamUnreachable(f"{instance} cannot be reached", slug=broken, stage=stage)


def cause(error: Exception) -> BaseException:
    """What it is due to: of a connection's own errors, what they came of."""
    return error.__cause__ or error
