"""A disk of a test's own, which the test fills or makes read-only."""

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
    """A mounted tmpfs.

    Attributes:
        path: where every process of this user reaches it.
        mounted: where it is mounted, as `mount` names it.
        prefix: what a command begins with that may mount there.
    """

    path: Path
    mounted: Path
    prefix: tuple[str, ...]

    def remount(self, how: str) -> None:
        """Make it read-only, `ro`, or writable again, `rw`. Modes alone do not keep root out."""
        # Of this mount alone: a namespace's owner may not change what a file system was made with.
        command = ["mount", "-o", f"remount,bind,{how}", str(self.mounted)]
        subprocess.run([*self.prefix, *command], check=True)

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Not a byte can be written meanwhile."""
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

    It is mounted by root, by sudo without a password, or in a new user namespace. Mounts of a
    namespace are reached through a process in it.
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
    """Yield the id of a process in a separate user and mount namespace, where this is possible."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        with suppress(BrokenPipeError):
            holder.stdin.write(b"\n")
            holder.stdin.flush()
        holder.stdout.readline()  # it is in there, or it has ended
        yield holder.pid
