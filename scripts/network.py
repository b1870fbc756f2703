"""Network namespace of this process."""

import ctypes
import os
from pathlib import Path

CLONE_NEWNET = 0x40000000  # of <linux/sched.h>; `os.setns` is new in Python 3.12


def enter_network(namespace: Path) -> None:
    """Move this thread, and what it starts from now on, into a network namespace.

    Raises:
        OSError: there is no such namespace, or this process may not enter it.
    """
    fd = os.open(namespace, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(namespace))
    finally:
        os.close(fd)
