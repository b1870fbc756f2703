"""The commands of docs/guides/several-hosts.md, typed on three hosts with networks of their own."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from ec_store.arena.store import ArenaStore
from ec_store.arena.url import ArenaOptions
from scripts.forked import SHARED_SERVER, vllm_server
from tests.e2e.stacks import VISION
from tests.ec_store.waiting import until
from tests.paths import ROOT
from tests.support.namespaces import connected, why_not
from tests.support.redis_server import binary

GUIDE = (ROOT / "docs" / "guides" / "several-hosts.md").read_text()
SECTION = GUIDE.partition("## Two hosts, command by command\n")[2].partition("\n## ")[0]
SECRETS, REDIS, BOTH, ONE_PROXY, ASK = re.findall(
    r"^```bash\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL
)
START_S = 200.0
HOSTS = ("10.77.0.1", "10.77.0.2")
THIRD = "10.77.0.3"
PATIENT = "epd serve --ec-store-budget-s 2"  # no result depends on the speed of the machine


@dataclass
class Hosts:
    """Hosts with what the guide starts on them.

    Attributes:
        names: namespace of each address.
        folder: folder of the logs.
        environment: variables of all commands.
        ended: stack that waits for the commands, after their namespaces were deleted.
    """

    names: Mapping[str, str]
    folder: Path
    environment: Mapping[str, str]
    ended: ExitStack

    def start(self, address: str, commands: str, name: str) -> None:
        """Type commands on a host, in a folder of a name; they end with its namespace."""
        folder = self.folder / name
        folder.mkdir(mode=0o700)
        with (folder / "shell.log").open("wb") as log:
            process = subprocess.Popen(
                self._command(address, f"{commands}\nwait"),
                cwd=folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.ended.enter_context(process)

    def output(self, address: str, commands: str) -> str:
        """Return what commands print on a host."""
        done = subprocess.run(
            self._command(address, commands),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        return done.stdout

    def share_all(self) -> bool:
        """Read on the second host what the first one has; it comes from Redis."""
        urls = [
            ArenaOptions(str(self.folder / f"memory-{n}/arena.sock"), timeout_s=20) for n in (0, 1)
        ]
        with ArenaStore(urls[0]) as first, ArenaStore(urls[1]) as second:
            keys = [row.info.key for row in first.ls() if row.info is not None]
            return bool(keys) and all(second.get(key) is not None for key in keys)

    def _command(self, address: str, commands: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[address], "bash", "-c", f"{SECRETS}\n{commands}"]

    def wait_until_ready(self, address: str) -> None:
        """Wait until the proxy of a host is ready."""
        url = f"http://{address}:8000/ready"
        try:
            self.output(address, f"until curl -sfo /dev/null {url}; do sleep 0.2; done")
        except subprocess.TimeoutExpired as error:
            for path in self.folder.rglob("*.log"):
                error.add_note(f"{path}\n{path.read_text()[-3000:]}")
            raise


@pytest.fixture
def hosts(models: Path, tmp_path: Path) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "redis-server").symlink_to(binary())
    for name, module in {
        "vllm": "tests.e2e.forked_vllm",
        "ec-store": "ec_store",
        "epd": "epd",
    }.items():
        script = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n'
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        SHARED_SERVER: str(vllm_server()),
    }
    with ExitStack() as ended, connected([THIRD, *HOSTS]) as names:
        hosts = Hosts(names, tmp_path, environment, ended)
        hosts.start(THIRD, REDIS.replace("64gb", "64mb"), "redis")
        for number, address in enumerate(HOSTS):
            given = {
                "export HOST=10.77.0.1": f"export HOST={address}",
                "Qwen/Qwen2.5-VL-7B-Instruct": str(models / VISION),
                "/run/ec-store": str(tmp_path / f"memory-{number}"),
                "64GiB": "128MiB",
                "epd serve": PATIENT,
            }
            commands = BOTH
            for old, new in given.items():
                assert old in commands
                commands = commands.replace(old, new)
            hosts.start(address, commands, f"{number}")
        hosts.start(THIRD, ONE_PROXY.replace("epd serve", PATIENT), "third")
        for address in (*HOSTS, THIRD):
            hosts.wait_until_ready(address)
        yield hosts


def test_namespaces_of_a_killed_test_process_are_deleted_by_the_next() -> None:
    if reason := why_not():
        pytest.skip(reason)
    code = """if True:
        import os, signal, subprocess
        from tests.support.namespaces import connected
        with connected(["10.78.0.1"]) as names:
            [name] = names.values()
            command = ["ip", "netns", "exec", name, "sleep", "600"]
            left = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            print(name, left.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    name, pid = killed.stdout.split()
    assert Path(f"/run/netns/{name}").exists()

    with connected(["10.78.0.1"]):
        assert not Path(f"/run/netns/{name}").exists()
    until(lambda: not is_running(int(pid)))


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.timeout(900)  # two fleets, of which each may take three minutes on a busy machine
def test_an_item_of_one_host_is_a_hit_on_the_other_and_through_a_third(hosts: Hosts) -> None:
    define, calls = ASK.split("\n}\n")
    shown = re.findall(r"^    (x-epd-items: .*)$", SECTION, re.MULTILINE)
    items = []
    for call in calls.splitlines():
        items.append(hosts.output(THIRD, f"{define}\n}}\n{call}").strip())
        until(hosts.share_all)

    assert items == shown
    assert len(shown) == 3
