"""Two programs that keep engines from outliving `epd up`. Started by path; standard library only.

`guard.py` ends process groups when the process that started them was killed. Each line of its input
is `+<group>` for a group to watch, or `-<group>` for one that has ended. The input ends when its
writer ends.

`guard.py <descriptor> <command> ...` announces its own process group to the guard, closes the pipe
and executes the command. So the guard knows each group before the command runs, even if the process
that started it is killed meanwhile.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

TERM_S = 10.0
POLL_S = 0.1


class Group:
    """Process group of a server, named by the PID of its leader.

    The number belongs to the group while its leader is not reaped or a member is left. Later the
    kernel may give it to a process of another program.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._leader: int | None = None
        with suppress(OSError):  # it has ended, or the kernel is older than 5.3
            self._leader = os.pidfd_open(number)

    def signal(self, number: int) -> bool:
        """Send a signal to the group, unless it has ended; return whether it was sent."""
        if not self._has_leader() and Path(f"/proc/{self._number}").exists():
            return False  # another process has the number of the leader
        try:
            os.killpg(self._number, number)
        except ProcessLookupError:
            return False
        return True

    def _has_leader(self) -> bool:
        """Return whether the leader runs, or has ended and its number is still reserved."""
        if self._leader is None:
            return False
        try:
            signal.pidfd_send_signal(self._leader, 0)
        except ProcessLookupError:
            return False
        return True


def watch_groups() -> None:
    """Read until the input ends, then end the remaining groups."""
    groups: dict[int, Group] = {}
    for line in sys.stdin:
        if line.startswith("+"):
            groups[int(line)] = Group(int(line))
        else:
            groups.pop(-int(line), None)
    left = [group for group in groups.values() if group.signal(signal.SIGTERM)]
    deadline_s = time.monotonic() + TERM_S
    while left and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        left = [group for group in left if group.signal(0)]
    for group in left:
        group.signal(signal.SIGKILL)


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
