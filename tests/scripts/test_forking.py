"""Fork server: status and group of its programs, and clients and servers that are killed."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.forking import ForkedProgram, start_server
from tests.support.programs import ADDRESS, INSTANCES

SERVE = ["serve", *ADDRESS, *INSTANCES, "--drain-delay-s", "0"]


@pytest.fixture(scope="module")
def server() -> Path:
    return start_server("tests.support.forked_epd")


@pytest.fixture
def output(tmp_path: Path) -> Iterator[int]:
    with (tmp_path / "output").open("wb") as file:
        yield file.fileno()


def epd(server: Path, *words: str, output: int | None = None) -> ForkedProgram:
    return ForkedProgram(server, words, os.environ, output, own_group=True)


def until_listening(program: ForkedProgram) -> None:
    assert program.stderr is not None
    while "listening" not in program.stderr.readline():
        assert program.poll() is None


def until_gone(pid: int) -> None:
    while Path(f"/proc/{pid}").exists() and state_of(pid) != "Z":
        time.sleep(0.05)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(("words", "status"), [(["--version"], 0), (["up"], 2)])
def test_a_program_returns_its_status_and_writes_to_its_output(
    server: Path, output: int, tmp_path: Path, words: list[str], status: int
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MODEL"}
    program = ForkedProgram(server, words, environment, output)

    assert program.wait() == program.poll() == status
    assert (tmp_path / "output").read_text().startswith("epd")


def test_a_program_is_in_its_own_group_before_it_can_be_signalled(server: Path) -> None:
    with epd(server, *SERVE) as program:
        assert os.getpgid(program.pid) == program.pid
        until_listening(program)
        os.killpg(program.pid, signal.SIGKILL)

    assert program.returncode == -signal.SIGKILL


def test_a_program_is_killed_if_its_test_fails(server: Path) -> None:
    program = epd(server, *SERVE)
    until_listening(program)
    with pytest.raises(KeyboardInterrupt), program:
        raise KeyboardInterrupt

    assert program.returncode == -signal.SIGKILL


def test_a_client_that_was_killed_leaves_the_server_running(server: Path, output: int) -> None:
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(server))

    assert epd(server, "--version", output=output).wait() == 0


def test_a_program_has_a_status_after_the_death_of_its_server() -> None:
    program = epd(start_server("tests.support.forked_epd"), *SERVE)
    until_listening(program)
    os.kill(parent_of(program.pid), signal.SIGKILL)

    assert program.wait(30) == -signal.SIGKILL
    until_gone(program.pid)  # the kernel sends SIGTERM to the program itself
    assert program.stderr is not None
    program.stderr.close()
