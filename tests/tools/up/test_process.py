"""Starting and stopping of servers, with small servers instead of engines."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from epd.routing.instances import Role
from epd.tools.up.engine import Engine
from epd.tools.up.platforms import CPU
from epd.tools.up.process import STOP_TIMEOUT_S, Process, ProcessDied, stop, wait_until_ready
from epd.tools.up.settings import FleetSettings
from epd.tools.up.topology import Topology
from scripts.ports import free_ports
from scripts.stack import Stack

SERVER = """
import subprocess, sys, http.server
if sys.argv[2] == "with-child":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if sys.argv[2] == "stubborn":
    import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def start(tmp_path: Path, code: str = SERVER, how: str = "plain") -> Process:
    [port] = free_ports(1)
    command = [sys.executable, "-c", code, str(port), how]
    return Process("server", f"http://127.0.0.1:{port}", command, {}, tmp_path / "server.log")


def group_is_gone(pid: int) -> bool:
    """Return whether a process group has no process left, except zombies not yet reaped."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == pid and fields[0] != "Z":
            return False
    return True


@pytest.mark.parametrize("how", ["plain", "with-child"])
def test_a_server_is_waited_for_and_stopped_with_its_children(tmp_path: Path, how: str) -> None:
    reports: list[str] = []
    process = start(tmp_path, how=how)
    wait_until_ready([process], 30, reports.append)
    assert not group_is_gone(process.pid)
    stop(([process], STOP_TIMEOUT_S))

    assert group_is_gone(process.pid)
    assert any("server is ready after" in line for line in reports)


def test_a_server_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    process = start(tmp_path, "print('about to fail'); raise SystemExit(3)")
    with pytest.raises(ProcessDied, match=r"code 3[\s\S]*about to fail"):
        wait_until_ready([process], 30, lambda _: None)
    process.kill()


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (
            "ValueError: No available memory for the cache blocks. Try",
            "allocated memory of the dev",
        ),
        (
            "AssertionError: Error in memory profiling. Initial free",
            "released memory of the device",
        ),
    ],
)
def test_a_neighbour_on_the_device_is_named_as_the_cause_of_an_end(
    tmp_path: Path, words: str, cause: str
) -> None:
    """The words of vLLM are further up in the log than its last lines."""
    process = start(tmp_path, f"print({words!r}); print('trace\\n' * 60); raise SystemExit(1)")
    with pytest.raises(ProcessDied, match=rf"code 1[\s\S]*trace\n+server: .*{cause}") as died:
        wait_until_ready([process], 30, lambda _: None)
    process.kill()

    assert "one after another" in str(died.value)


def test_the_exception_of_an_engine_is_named_although_its_server_logs_more(tmp_path: Path) -> None:
    prefix = "(EngineCore pid=7) ERROR 11-28 02:37:33 [core.py:1512]"
    texts = [
        "EngineCore encountered a fatal error.",
        "Traceback (most recent call last):",
        "  File core.py",
        "KeyError: 1",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        "  File core.py",
        "AssertionError: no such request",
        "of two lines",
    ]
    lines = [*(f"{prefix} {text}" for text in texts), *["(APIServer pid=6) INFO shutdown"] * 60]
    process = start(tmp_path, f"print({chr(10).join(lines)!r})")
    process.join(time.monotonic() + 60)
    with pytest.raises(ProcessDied) as died:
        process.check_alive()
    process.kill()

    assert str(died.value).endswith("server: its engine failed: AssertionError: no such request.")


def test_probes_do_not_push_the_last_words_of_a_server_out(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; time.sleep(60)")
    access = '(APIServer pid=7) INFO:     127.0.0.1:39174 - "{} HTTP/1.1" {}\n'
    lines = [access.format("GET /health", "500 Internal Server Error"), "the engine is out\n"]
    probes = [access.format(f"GET {path}", "200 OK") for path in ("/health", "/metrics")] * 40
    process.log.write_text("".join([*lines, *probes]))
    tail = process.tail()
    process.kill()

    assert tail == "".join(lines).rstrip("\n")


@pytest.mark.parametrize(
    ("log", "doing"),
    [
        ("", "its log is empty"),
        ("anything\n", "anything"),
        (
            "INFO 11-21 17:53:40 [a.py:1] x\n(Worker) shards:  50% done\r",
            "(Worker) shards:  50% done",
        ),
        ("[warning  ] instance  a=\x1b[31m1\n", "[warning  ] instance  a=[31m1"),
    ],
)
def test_progress_of_a_server_is_read_from_its_log(tmp_path: Path, log: str, doing: str) -> None:
    process = start(tmp_path, "import time; time.sleep(60)")
    process.log.write_text(log)
    said = process.last_message()
    process.kill()

    assert said == doing


def test_progress_of_a_server_is_reported(tmp_path: Path) -> None:
    reports: list[str] = []
    process = start(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(TimeoutError):
        wait_until_ready([process], 1, reports.append, progress_s=0.2)
    process.kill()

    assert re.fullmatch(r"server after \d+ s: its log is empty", reports[0])


def test_the_last_server_is_reported_only_when_the_others_are_ready(
    tmp_path: Path,
) -> None:
    reports: list[str] = []
    processes = []
    for name in ("first", "last"):
        (tmp_path / name).mkdir()
        processes.append(start(tmp_path / name, "import time; time.sleep(60)"))
        processes[-1].name = name
    with pytest.raises(TimeoutError, match="first, last"):
        wait_until_ready(processes, 1, reports.append, progress_s=0.2)
    for process in processes:
        process.kill()

    assert reports
    assert not any("last" in one for one in reports)


def test_a_server_that_never_serves_is_reported(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; print('loading', flush=True); time.sleep(60)")
    with pytest.raises(TimeoutError, match=r"server[\s\S]*loading"):
        wait_until_ready([process], 1, lambda _: None)
    process.kill()

    assert group_is_gone(process.pid)


def test_a_server_that_never_starts_is_reported(tmp_path: Path) -> None:
    process = start(tmp_path)
    with pytest.raises(TimeoutError, match=r"not ready after 1 s: .*later"):
        wait_until_ready([process], 1, lambda _: None, lambda _ready: ["later"])
    process.kill()


def test_a_server_that_ignores_sigterm_is_killed(
    tmp_path: Path,
) -> None:
    process = start(tmp_path, how="stubborn")
    wait_until_ready([process], 30, lambda _: None)
    stop(([process], 0.5))

    assert group_is_gone(process.pid)


def test_ports_are_free_and_different() -> None:
    ports = free_ports(20)

    assert len(set(ports)) == 20


@pytest.mark.parametrize(
    "name", ["", "1e", "1p", "1d", "e1p1d", "1e1p", "0e1pd", "1e1pd1d", "e1pd", "epd", "1epd1pd"]
)
def test_an_invalid_topology_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="topology"):
        Topology.parse(name)


def engine(role: Role, *more: str, **settings: Any) -> Engine:
    return Engine(
        role=role,
        port=8001,
        settings=FleetSettings(model="m", **settings),
        store="file:///store",
        platform=CPU,
        side_channel_port=5600,
        flags=more,
    )


@pytest.mark.parametrize("role", [Role.PREFILL, Role.PREFILL_DECODE])
def test_consumers_write_their_encodes_to_the_store_if_asked(role: Role) -> None:
    command = engine(role, ec_both=True).command()
    config = json.loads(command[command.index("--ec-transfer-config") + 1])

    assert config["ec_role"] == "ec_both"


def flags(role: Role) -> dict[str, str]:
    command = engine(role).command()
    return dict(zip(command, [*command[1:], ""], strict=True))


@pytest.mark.parametrize(
    ("role", "ec_role", "kv_role"),
    [
        (Role.ENCODE, "ec_producer", None),
        (Role.PREFILL, "ec_consumer", "kv_producer"),
        (Role.DECODE, None, "kv_consumer"),
        (Role.PREFILL_DECODE, "ec_consumer", None),
    ],
)
def test_each_role_has_its_connectors(role: Role, ec_role: str | None, kv_role: str | None) -> None:
    given = flags(role)
    ec = json.loads(given.get("--ec-transfer-config", "{}"))
    kv = json.loads(given.get("--kv-transfer-config", "{}"))

    assert (ec.get("ec_role"), kv.get("kv_role")) == (ec_role, kv_role)
    assert ("--no-enable-prefix-caching" in given) == (role is Role.ENCODE)


def test_additional_flags_of_an_engine_are_the_last_ones() -> None:
    """Later flags override those that all engines get."""
    more = ("--dtype", "bfloat16")

    assert engine(Role.ENCODE, *more).command()[-2:] == more


def test_a_stack_gives_flags_to_the_engines_of_a_role(tmp_path: Path) -> None:
    more = ["--tensor-parallel-size", "2"]
    (tmp_path / "config.json").touch()
    stack = Stack(
        tmp_path,
        Topology.parse("2e1pd"),
        tmp_path,
        local_media=tmp_path,
        flags={Role.ENCODE: more},
    )

    assert [engine.flags for engine in stack.all_engines] == [tuple(more), tuple(more), ()]


def test_stopping_twice_at_once_leaves_nothing(tmp_path: Path) -> None:
    """The test sends a second Ctrl-C while servers are being stopped."""
    pid_file = tmp_path / "pid"
    script = f"""
import signal
import sys
from pathlib import Path
from tests.tools.up.test_process import start
from epd.tools.up.process import STOP_TIMEOUT_S, stop, wait_until_ready
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
process = start(Path({str(tmp_path)!r}), how="stubborn")
wait_until_ready([process], 30, lambda _: None)
Path({str(pid_file)!r}).write_text(str(process.pid))
stop(([process], STOP_TIMEOUT_S))
"""
    root = Path(__file__).resolve().parents[3]
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=root, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not pid_file.exists() or not pid_file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(parent.pid, signal.SIGINT)
    parent.wait(60)

    assert group_is_gone(int(pid_file.read_text()))


NEXT_PID = Path("/proc/sys/kernel/ns_last_pid")


def foreign_group(number: int, tries: int = 100) -> subprocess.Popen[bytes] | None:
    """Start a process group of another program with this number, if the kernel gives it away."""
    for _ in range(tries):  # processes of other tests may get the number first
        NEXT_PID.write_text(str(number - 1))
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        foreign = subprocess.Popen(command, start_new_session=True)
        if foreign.pid == number:
            return foreign
        foreign.kill()
        foreign.wait()
        time.sleep(0.02)
    return None


@pytest.fixture
def reuses_pids() -> None:
    if not os.access(NEXT_PID, os.W_OK):
        pytest.skip("this kernel does not let the test choose the next PID")


@pytest.mark.usefixtures("reuses_pids")
def test_a_server_that_has_ended_keeps_its_number_until_its_last_signal(tmp_path: Path) -> None:
    process = start(tmp_path, "import sys; sys.exit(3)")
    process.join(time.monotonic() + 60)
    with pytest.raises(ProcessDied, match="ended with code 3"):
        process.check_alive()

    assert foreign_group(process.pid, tries=3) is None
    process.kill()
    foreign = foreign_group(process.pid)
    assert foreign is not None
    process.kill()
    assert foreign.poll() is None
    foreign.kill()
    foreign.wait()


KILLED = """
import os, signal, sys
from pathlib import Path
from epd.tools.up.process import Process

log, *command = sys.argv[1:]
process = Process("server", "http://127.0.0.1:1", command, {}, Path(log))
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_ends_if_its_parent_is_killed_during_the_start(tmp_path: Path) -> None:
    sleeps = (sys.executable, "-c", "import time; time.sleep(600)")
    ran = subprocess.run(
        (sys.executable, "-c", KILLED, tmp_path / "log", *sleeps),
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    group = int(ran.stdout)
    try:
        assert ran.returncode == -signal.SIGKILL
        deadline_s = time.monotonic() + 60
        while not group_is_gone(group) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert group_is_gone(group)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
