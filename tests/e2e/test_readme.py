"""The commands of README and of "Five minutes", pasted in order into terminals.

A command that is neither run nor named here fails a test.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from scripts.ports import free_ports
from tests.e2e.stacks import VISION
from tests.paths import ROOT
from tests.tools.up.processes import left, marked, new_mark

PAGES = {page: (ROOT / page).read_text() for page in ("README.md", "docs/index.md")}
SHELL = "```bash"
INDENT = "    "
COMMENT = re.compile(r"\s{2,}# .*")
READY_S = 300
TRIES = 5

ON_CPU = "--device cpu --ec-store-memory 64MiB"
ENGINE_ON_CPU = "--dtype float32 --max-model-len 4096 --max-num-seqs 16 --enforce-eager"


def blocks(text: str) -> Iterator[str]:
    """Yield the lines of indented blocks, and of those with a fence and the language `bash`.

    They are without comments.
    """
    fence = ""
    for line in text.splitlines():
        if line.startswith("```"):
            fence = "" if fence else line
        elif fence == SHELL or (not fence and line.startswith(INDENT)):
            yield COMMENT.sub("", line.removeprefix(INDENT))


def commands(page: str) -> list[str]:
    """Return the commands of a page. One with an open quote continues on the next line."""
    found, pending = [], ""
    for line in blocks(PAGES[page]):
        pending += line
        try:
            shlex.split(pending)
        except ValueError:
            pending += "\n"
            continue
        if pending.endswith("\\"):
            pending += "\n"
            continue
        found.append(pending)
        pending = ""
    assert pending == ""
    return found


@dataclass
class Terminals:
    """Terminals of one reader, with free ports in place of the documents' ones.

    Attributes:
        folder: runtime folder of the user, with a short path: sockets are in it.
        model: folder of the model that takes the place of the documents' models.
    """

    folder: Path
    model: Path
    mark: str = field(default_factory=new_mark)
    said: str = ""
    answers: list[str] = field(default_factory=list)
    _open: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        programs = self.folder / "bin"
        programs.mkdir()
        for name in ("epd", "ec-store"):
            script = programs / name
            line = f'exec {sys.executable} -m tests.e2e.documented {name} "$@"'
            script.write_text(f"#!/bin/sh\n{line}\n")
            script.chmod(0o755)
        names = ("8200", "8201", "8000", "8100", "8001", "8002", "8400")
        self.ports = dict(zip(names, neighbours(len(names)), strict=True))
        self.environ = {
            **marked(self.mark),
            "XDG_RUNTIME_DIR": str(self.folder),
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }

    def stop(self) -> None:
        """End all servers, the last one first."""
        self._open.close()

    def close(self) -> None:
        self.stop()
        assert left(self.mark, 30) == {}

    def here(self, command: str) -> str:
        """Return a command with this test's ports, folder and model."""
        for port, free in self.ports.items():
            command = re.sub(
                rf"(localhost:|127\.0\.0\.1:|--port ){port}\b", rf"\g<1>{free}", command
            )
        command = command.replace("/run/ec-store/", f"{self.folder}/").replace("16GiB", "64MiB")
        return command.replace("vllm serve MODEL", f"vllm serve {self.model}")

    def run(self, command: str) -> None:
        done = subprocess.run(
            ["/bin/bash", "-c", self.here(command)],
            cwd=ROOT,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        self.said = done.stdout
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

    def start(self, command: str, ready: str | None, flags: str = "") -> None:
        """Start a server that ends with the test.

        It is ready when it prints a line with `ready`; None: when its port answers `/health`.
        """
        line = f"exec {self.here(command).strip()} {flags}"
        log = self.folder / f"{len(self.answers)}-{time.monotonic_ns()}.log"
        with log.open("w") as output:
            server = subprocess.Popen(
                ["/bin/bash", "-c", line],
                cwd=ROOT,
                env=self.environ,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._open.callback(server.wait)
        self._open.callback(server.send_signal, signal.SIGINT)
        port = re.search(r"--port[= ](\d+)", line)
        deadline_s = time.monotonic() + READY_S
        while not (ready in log.read_text() if ready else port and healthy(port[1])):
            assert server.poll() is None, f"{line}\n{log.read_text()}"
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.2)
        self.said = log.read_text()

    def up(self, command: str) -> None:
        """Start a fleet, which takes the place of one that runs."""
        self.stop()
        ports = {"port": "8000", "encode-port": "8200", "prefill-decode-port": "8400"}
        flags = [f"--{name} {self.ports[port]}" for name, port in ports.items()]
        store, *_ = free_ports(1)
        logs = f"--log-path {self.folder}/logs --ec-store-port {store}"
        self.fleet = f"--model {self.model} {ON_CPU} {' '.join(flags)} {logs}"
        self.start(command, "Ctrl-C stops all servers.", self.fleet)
        for line in re.findall(r"^  \S.* ((?:epd|ec-store) .*)$", self.said, re.MULTILINE):
            self.run(line + (" --once" if line.startswith("epd top") else ""))

    def send(self, command: str) -> None:
        """Send a picture twice.

        The second one is sent again after a miss: on a busy machine a look-up exceeds its budget.
        """
        self.answers.append(self._items(command))
        for _ in range(TRIES):
            if (items := self._items(command)).startswith("hit=1"):
                break
        self.answers.append(items)

    def _items(self, command: str) -> str:
        self.run(command)
        found = re.search(r"^x-epd-items: (\S+)", self.said, re.MULTILINE)
        assert found is not None, self.said
        return found[1]

    def set_key(self, command: str) -> None:
        self.run(command)
        self.environ["ADMIN_API_KEY"] = self.said.strip()

    def dry_run(self, command: str) -> None:
        self.run(f"{command} --dry-run")

    def plan(self, command: str) -> None:
        """Print the plan of a fleet beside the running one, and paste its second encode engine."""
        self.run(f"{command} {self.fleet}")
        [pasted] = re.findall(
            rf"^# encode-{self.ports['8201']}\n((?:.+\n)+)", self.said, re.MULTILINE
        )
        self.start(pasted, "Application startup complete")


def healthy(port: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code in {200, 503}
    except httpx.TransportError:
        return False


def neighbours(count: int) -> list[int]:
    """Return free ports, of which the second follows the first."""
    while True:
        ports = free_ports(count + 200)
        for first in ports:
            if first + 1 in ports:
                others = [port for port in ports if port not in {first, first + 1}]
                return [first, first + 1, *others[: count - 2]]


Action = Callable[[Terminals, str], None]


def named(reason: str) -> Action:
    """Return what is done for a command that is not run: nothing, for this reason."""
    del reason
    return lambda terminals, command: None


ACTIONS: Mapping[str, Action] = {
    r"\./scripts/demo\.sh": named("tests/e2e/test_demo.py runs it"),
    r"\./scripts/test\.sh": named("it runs this test"),
    r"pip install \./ec_store '\.\[vllm\]'": named("for a GPU: it installs vLLM's build for CUDA"),
    r"source \.venv/bin/activate": named("the programs of this test are in the PATH"),
    r"export ADMIN_API_KEY=\$": Terminals.set_key,
    r"epd up .*--gpus": Terminals.dry_run,  # for GPUs: the README names --dry-run beside it
    r"epd up --model Qwen/Qwen2\.5-VL-3B-Instruct --topology 1epd$": Terminals.dry_run,  # "On GPUs"
    r"epd up .*--dry-run": Terminals.plan,
    r"epd up ": Terminals.up,
    r"curl -i localhost:8000/v1/chat/completions": Terminals.send,
    r"(curl|epd top|epd doctor|ec-store stat)\b": Terminals.run,
}
"""What is done for the commands that begin so; the first that applies."""

SERVERS: Mapping[str, Action] = {
    r"ec-store serve ": lambda terminals, command: terminals.start(
        command, None, f"--port {terminals.ports['8100']}"
    ),
    r"vllm serve ": lambda terminals, command: terminals.start(command, None, ENGINE_ON_CPU),
    r"epd serve ": lambda terminals, command: terminals.start(
        command, None, f"--port {terminals.ports['8000']}"
    ),
}
"""The same for servers that a reader starts one by one, beside no fleet."""


def action(command: str) -> Action | None:
    every = {**ACTIONS, **SERVERS}
    return next((every[begin] for begin in every if re.match(begin, command)), None)


@contextmanager
def terminals(model: Path) -> Iterator[Terminals]:
    with TemporaryDirectory(prefix="epd-") as folder:
        made = Terminals(Path(folder), model)
        try:
            yield made
        finally:
            made.close()


def typed_in_order(page: str, typed: Terminals) -> Iterator[str]:
    """Yield each command of a page after it has run, and before the next one runs."""
    for command in commands(page):
        act = action(command)
        assert act is not None
        act(typed, command)
        yield command


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_run_or_named(page: str) -> None:
    assert len(commands(page)) > 8
    assert [command for command in commands(page) if action(command) is None] == []


@pytest.mark.timeout(900)  # it starts engines as programs, which import vLLM
def test_the_commands_of_the_readme_work_in_order(models: Path) -> None:
    with terminals(models / VISION) as typed:
        for command in typed_in_order("README.md", typed):
            if command.startswith("epd top"):
                assert "1epd" in typed.said
            elif command.startswith("ec-store stat"):
                # The reader's picture, and the one of the doctor that `epd up` has named.
                assert re.search(r"^entries +2$", typed.said, re.MULTILINE)
            elif "--gpus" in command:
                assert "CUDA_VISIBLE_DEVICES=2,3" in typed.said
                typed.stop()  # the fleet: servers of the reader's own follow
        [picture] = [each for each in commands("README.md") if each.startswith("curl -i")]
        typed.send(picture)  # to the servers of the reader

    new, known = "hit=0,encoded=0,local=1", "hit=1,encoded=0,local=0"
    assert typed.answers == [new, known, new, known]
    assert f"x-epd-items: {new}`" in PAGES["README.md"]
    assert f"`{known}`" in PAGES["README.md"]


@pytest.mark.timeout(900)  # it starts engines as programs, which import vLLM
def test_the_commands_of_five_minutes_work_in_order(models: Path) -> None:
    with terminals(models / VISION) as typed:
        for command in typed_in_order("docs/index.md", typed):
            if command.startswith("epd top"):
                assert "1e1pd" in typed.said
            elif command.startswith("curl localhost:8000/instances"):
                assert json.loads(typed.said) == {"registered": True}
            elif command.startswith("curl -X DELETE"):
                assert json.loads(typed.said) == {"removed": True}
