"""Child processes of a test, which may be those of another user."""

import os
import traceback
from collections.abc import Callable, Sequence


def start(call: Callable[[], object], user: int | None = None, groups: Sequence[int] = ()) -> int:
    """Run a call in a child process; return its id. The files of another user are private."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        if user is not None:
            os.setgroups(groups)
            os.setgid(user)
            os.setuid(user)
            os.umask(0o077)
        call()
        status = 0
    except BaseException:  # noqa: BLE001 - the parent checks the exit status
        traceback.print_exc()
    finally:
        os._exit(status)


def ended(child: int) -> int:
    """Wait for the end of a child; return its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
