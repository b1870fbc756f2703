"""Process at the other end of a Unix socket."""

import asyncio
import errno
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

_SO_PEERPIDFD = 77  # <asm-generic/socket.h>
_CREDENTIALS = struct.Struct("=iII")  # pid, uid and gid of unix(7)


@dataclass(slots=True, eq=False)
class Peer:
    """Process at the other end of a connection.

    Attributes:
        pid: its PID when it connected; 0: it is in a PID namespace that this process does not see.
        uid: user that it was started by.
        pidfd: descriptor of it, which is readable once it has ended; None: the kernel gives none.
    """

    pid: int
    uid: int
    pidfd: int | None
    timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, connection: socket.socket) -> Self:
        """Return the peer of a connection.

        Raises:
            OSError: the process is gone, or this one has no descriptor left.
        """
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        try:
            return cls(pid, uid, connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:
                raise
        pidfd: int | None = None
        # If its number belongs to another process by now, bytes stay longer.
        with suppress(OSError):
            pidfd = os.pidfd_open(pid)
        return cls(pid, uid, pidfd)

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
        if self.timer is not None:
            self.timer.cancel()
