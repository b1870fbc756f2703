"""Program that ends with the process that started it: `parent.py <its process id> <command> ...`.

Started by path; standard library only. Linux sends SIGTERM to a process that asked for it when its
parent ends, also by SIGKILL. `preexec_fn` of `subprocess` could ask too, but Python would lose a
signal that arrives while it forks.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Let this process get SIGTERM when its parent ends, or now if it has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the command would too
    try:
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the command is `epd up`'s own
    except OSError as error:
        sys.exit(f"{sys.argv[2]!r} cannot be started: {error.strerror}")
