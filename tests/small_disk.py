"""Small separate disk that a test can fill or make read-only."""

import errno
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

AS_ROOT: tuple[list[str], ...] = ([], ["sudo", "--non-interactive"])


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """Mounted tmpfs.

    Attributes:
        path: path that every process of this user can reach.
        mounted: mount point, as `mount` names it.
        prefix: command prefix that has permission to mount there.
    """

    path: Path
    mounted: Path
    prefix: tuple[str, ...]

    def remount(self, how: str) -> None:
        """Remount the disk read-only (`ro`) or writable (`rw`). File modes do not stop root."""
        # Only this mount (`bind`): the owner of a namespace may not change the file system's
        # options.
        command = ["mount", "-o", f"remount,bind,{how}", str(self.mounted)]
        subprocess.run([*self.prefix, *command], check=True)

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Fill the disk for the duration of the context."""
        filler = self.path / "filler"
        try:
            with filler.open("wb", buffering=0) as file, _until_full():
                while True:
                    file.write(bytes(4096))
            yield
        finally:
            filler.unlink()


@contextmanager
def _until_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[SmallDisk]:
    """Mount a tmpfs; skip the test if there is no way to mount one.

    The mount is made as root, with sudo without a password, or in a new user namespace. A mount in
    a namespace is reached through a process in that namespace.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    with ExitStack() as undo:
        for prefix in AS_ROOT:
            if _ran([*prefix, *mount]):
                undo.callback(subprocess.run, [*prefix, "umount", "-l", str(folder)], check=True)
                yield SmallDisk(folder, folder, tuple(prefix))
                return
        holder = undo.enter_context(_namespace())
        inside = f"nsenter --target {holder} --user --mount --preserve-credentials".split()
        if not _ran([*inside, *mount]):
            pytest.skip(
                "no tmpfs can be mounted: this user is not root, has no sudo without a "
                "password, and may not mount in a namespace of its own"
            )
        yield SmallDisk(Path(f"/proc/{holder}/root{folder}"), folder, tuple(inside))


def _ran(command: list[str]) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@contextmanager
def _namespace() -> Iterator[int]:
    """Yield the id of a process in a new user and mount namespace, if that is possible."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        with suppress(BrokenPipeError):
            holder.stdin.write(b"\n")
            holder.stdin.flush()
        holder.stdout.readline()  # `cat` runs now, or `unshare` failed
        yield holder.pid
