"""Tells the guard of this process, and becomes a server.

A program of its own, started by its path: `announce.py <descriptor> <command> ...`. The guard does
not see the end of its input before every server has told it its process group, even if the process
that started the server is killed meanwhile.
"""

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Write to the guard, close its pipe, and execute the command."""
    guard, command = int(sys.argv[1]), sys.argv[2:]
    with suppress(BrokenPipeError):  # the guard was killed
        os.write(guard, f"+{os.getpid()}\n".encode())
    os.close(guard)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the command would too
    os.execvp(command[0], command)  # noqa: S606 - the command is `epd up`'s own


if __name__ == "__main__":
    main()
