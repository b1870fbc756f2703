"""Two programs that keep engines from outliving `epd up`. Started by path; standard library only.

`guard.py` ends process groups when the process that started them was killed. Each line of its input
is `+<group>` for a group to watch, `-<group>` for one that has ended, or `/<path>` for a folder to
delete after the groups have ended. The input ends when its writer ends.

`guard.py <descriptor> <command> ...` announces its own process group to the guard, closes the pipe
and executes the command. So the guard knows each group before the command runs, even if the process
that started it is killed meanwhile.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress

TERM_S = 10.0
POLL_S = 0.1


def watch_groups() -> None:
    """Read until the input ends, then end the remaining groups and delete the folders."""
    groups, folders = set[int](), list[str]()
    for line in sys.stdin:
        if line.startswith("/"):
            folders.append(line.rstrip("\n"))
            continue
        group = int(line)
        (groups.add if group > 0 else groups.discard)(abs(group))
    for group in groups:
        signal_group(group, signal.SIGTERM)
    deadline_s = time.monotonic() + TERM_S
    while time.monotonic() < deadline_s and any(signal_group(group, 0) for group in groups):
        time.sleep(POLL_S)
    for group in groups:
        signal_group(group, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; return whether the group exists."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False


def announce(guard: int, command: list[str]) -> None:
    """Announce this process group to the guard, and become the command."""
    with suppress(BrokenPipeError):  # the guard was killed
        os.write(guard, f"+{os.getpid()}\n".encode())
    os.close(guard)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the command would too
    os.execvp(command[0], command)  # noqa: S606 - the command is `epd up`'s own


if __name__ == "__main__":
    if len(sys.argv) > 1:
        announce(int(sys.argv[1]), sys.argv[2:])
    else:
        watch_groups()
