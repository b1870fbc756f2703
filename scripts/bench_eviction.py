"""Count the system calls and the CPU time of eviction and of `put`, with strace.

    .venv/bin/python scripts/bench_eviction.py --entries 10000 100000 --writers 1 64

Each step runs on a separate store on tmpfs, in a process under strace. Its CPU time is measured in
another run without strace, because strace takes most of the time.
"""

import argparse
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ec_store import Entry, EntryKey, Store, open_store
from ec_store.disk.config import GivenSettings
from ec_store.disk.files import Folder, Modes
from ec_store.disk.ledger import Ledger
from ec_store.disk.store import SharedDiskStore

BLOCK = 4096
STRACE = shutil.which("strace") or "strace"
BEGIN, END = "/begin-of-step", "/end-of-step"
TIMES = 64
STEPS: dict[str, tuple[float, int]] = {
    "evict, nothing to do": (2.0, 1),
    "evict, one victim": (1 / 0.95, 1),
    "put, nothing to do": (2.0, TIMES),
    "put into a full store": (1.0, TIMES),
}
"""Quota of each step, as a multiple of the store's size, and the number of repetitions."""


def main() -> None:
    """Print a table, or run one step of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--entries", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        _step(*args.step)
        return
    print("| step | entries | writers | system calls | CPU time, ms |")
    print("| --- | --- | --- | --- | --- |")
    for entries in args.entries:
        for writers in args.writers:
            root = Path(tempfile.mkdtemp(dir="/dev/shm"))
            try:
                _fill(root, entries, writers)
                for name in STEPS:
                    calls, cpu_ms = _measured(root, name)
                    print(f"| {name} | {entries:,} | {writers} | {calls:.0f} | {cpu_ms:.2f} |")
            finally:
                shutil.rmtree(root)


def _fill(root: Path, entries: int, writers: int) -> None:
    with open_store(root.as_uri()):
        pass
    for n in range(entries):
        digest = secrets.token_hex(32)
        folder = root / "entries" / digest[:2] / digest[2:4]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / digest).write_bytes(b"x")
        used_s = time.time() - 3600 * n / entries
        os.utime(folder / digest, (used_s, used_s))
    usage = Folder.open_path(str(root / "usage"), Modes())
    for n in range(writers):
        Ledger().charge(usage, BLOCK * (entries if n == 0 else 0), entries if n == 0 else 0)


def _measured(root: Path, name: str) -> tuple[float, float]:
    """Return the system calls and the CPU time in milliseconds of one repetition of a step."""
    command = [sys.executable, __file__, "--step", str(root), name]
    log = root / "strace"
    subprocess.run([STRACE, "-f", "-o", str(log), *command], check=True, stdout=subprocess.DEVNULL)
    lines = log.read_text(errors="replace").splitlines()
    begin, end = (next(n for n, line in enumerate(lines) if mark in line) for mark in (BEGIN, END))
    calls = sum(not re.search(r"resumed>|---|\+\+\+", line) for line in lines[begin + 1 : end])
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return calls / STEPS[name][1], float(done.stdout)


def _step(root: str, name: str) -> None:
    share, times = STEPS[name]
    with SharedDiskStore.from_url(Path(root).as_uri()) as store:
        store.configure(GivenSettings(max_bytes=2**40))
        call = _call(store, name)
        call("warm")
        quota = int((store.stats().bytes or 0) * share) - (BLOCK if "victim" in name else 0)
        store.configure(GivenSettings(max_bytes=quota))
        names = [secrets.token_hex(8) for _ in range(times)]
        store.stats()
        _mark(BEGIN)
        before = time.process_time()
        for entry_name in names:
            call(entry_name)
        print((time.process_time() - before) * 1000 / times)
        _mark(END)
        evictions = {"evict, one victim": range(1, 3), "put into a full store": range(64, 96)}
        if store.stats().evictions not in evictions.get(name, range(1)):
            sys.exit(f"{name}: {store.stats()} of a quota of {quota}")


def _call(store: Store, name: str) -> Callable[[str], object]:
    if name.startswith("evict"):
        return lambda _: store.evict()
    entry = Entry(memoryview(bytes(64)), "BF16", (32,), "image")
    return lambda name: store.put(EntryKey("bench", name), entry)


def _mark(name: str) -> None:
    Path(name).exists()


if __name__ == "__main__":
    main()
