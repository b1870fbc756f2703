"""`epd serve` as a process: flags, ports, signals."""

import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.certificates import localhost_certificate
from tests.requests import data_url, image, request
from tests.support.fake_instance import FakeInstance, decodes, encodes
from tests.support.fake_origin import FakeOrigin
from tests.support.programs import ADDRESS, EPD, INSTANCES, called, run, serving


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve", *INSTANCES, "--bogus"], "unrecognized arguments: --bogus"),
        (["serve"], "--encode-servers-urls is required"),
        (["serve", *INSTANCES, "--port", "x"], "--port"),
        (["serve", *INSTANCES, "--workers", "0"], "--workers"),
        (["serve", *INSTANCES, "--prefill-servers-urls", "http://d:1"], "listed as prefill and"),
        (["serve", *INSTANCES, "--dynamic-registration"], "needs EPD_ADMIN_API_KEY"),
        (["serve", *INSTANCES, "--registration-hosts", "a"], "needs --dynamic-registration"),
        (
            ["serve", *INSTANCES, "--registration-store", "redis://x"],
            "needs --dynamic-",
        ),
        (["serve", *INSTANCES, "--discover-decode", "d:1"], "needs prefill instances"),
        (
            ["serve", "--discover-prefill", "p:1", "--discover-prefill-decode", "d:1", *INSTANCES],
            "cannot be combined with",
        ),
        (["serve", *INSTANCES, "--discover-encode", "e:port"], "--discover-encode"),
        (["serve", *INSTANCES, "--discover-encode", "e"], "neither host:port nor a URL"),
        (["serve", *INSTANCES, "--discovery-dns-server", "ns"], "--discovery-dns-server"),
        (["serve", *INSTANCES, "--allow-http-media"], "--allow-http-media needs --media-fetch"),
        (["nothing"], "nothing"),
        ([], "COMMAND"),
    ],
)
def test_wrong_flags_end_in_a_line_each_and_code_2(args: list[str], message: str) -> None:
    ended = called(*args)

    assert ended.returncode == 2
    assert ended.stdout == ""
    assert message in ended.stderr
    assert all(": error: " in line for line in ended.stderr.splitlines())


@pytest.mark.parametrize("args", [["serve"], ["nothing"]])
def test_a_process_ends_as_the_call_of_its_entry_point(args: list[str]) -> None:
    ended, expected = run(*args), called(*args)

    assert ended.returncode == expected.returncode == 2
    assert (ended.stdout, ended.stderr) == (expected.stdout, expected.stderr)


def test_check_reports_the_settings_and_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "epd.yaml"
    file.write_text("max_items: 3")

    shown = run("check", *INSTANCES, "--config", str(file))
    refused = called("check", *INSTANCES, "--config", str(file), "--upstream-ca-file", "/nowhere")

    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"max_items: 3  # file {file}:1" in shown.stdout.splitlines()
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "epd check: error: --upstream-ca-file /nowhere: No such file" in refused.stderr


def test_a_closed_output_pipe_is_not_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as unread:
        ended = subprocess.run(
            [*EPD, "check", *INSTANCES],
            stdout=unread,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )

    assert (ended.returncode, ended.stderr) == (1, "")


def test_help_names_every_flag() -> None:
    ended = called("serve", "--help")

    assert ended.returncode == 0
    for flag in ("--encode-servers-urls", "--prefill-servers-urls", "--decode-servers-urls"):
        assert flag in ended.stdout
    for secret in ("--openai-api-key ", "--key-secret ", "--admin-api-key "):
        assert secret not in ended.stdout


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_taken_port_ends_in_one_line(workers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = ["--host", "127.0.0.1", "--port", str(port)]
        ended = run("serve", *INSTANCES, *address, "--workers", workers)

    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("ttl", "workers", "warned"),
    [("475", "1", 1), ("100000", "2", 1), ("474", "1", 0), ("450", "2", 0)],
)
def test_conversations_that_outlive_decodes_blocks_are_warned_of_once(
    ttl: str, workers: str, warned: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = ["--host", "127.0.0.1", "--port", str(port), "--workers", workers]
        ended = run("serve", *INSTANCES, *address, "--conversation-ttl", ttl)

    assert ended.stderr.count("decoder_kv_blocks_ttl") == warned


def test_errors_unrelated_to_the_address_do_not_blame_it() -> None:
    few = f"ulimit -n 32; exec {shlex.join([*EPD, 'serve', *INSTANCES, *ADDRESS])} --workers 32"
    ended = subprocess.run(
        ["/bin/sh", "-c", few], capture_output=True, text=True, timeout=120, check=False
    )

    assert ended.returncode == 1
    assert ended.stderr.endswith("epd serve: [Errno 24] Too many open files\n")
    assert "listen" not in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_signal_ends_it_cleanly_and_the_log_names_its_sender(
    number: signal.Signals, workers: str
) -> None:
    with serving(*INSTANCES, "--workers", workers) as (_, process):
        process.send_signal(number)

        assert process.wait(100) == 0
        assert process.stderr is not None
        [draining] = [
            line for line in map(json.loads, process.stderr) if line["event"] == "draining"
        ]
    name = Path("/proc/self/comm").read_text().strip()
    assert draining["cause"] == f"{number.name} from {name} (PID {os.getpid()})"


@pytest.mark.fault(117)
@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_log_that_is_not_read_stops_nothing(workers: str) -> None:
    """A pipe takes 64 KiB, which are the lines of some 300 requests."""
    with serving(*INSTANCES, "--workers", workers, "--log-level", "debug") as (url, process):
        async with aiohttp.ClientSession() as http:
            for _ in range(2000):
                async with http.get(f"{url}/nothing") as reply:
                    assert reply.status == 404
        process.terminate()

        assert await asyncio.to_thread(process.wait, 60) == 0


@pytest.mark.parametrize("hangs", ["loop", "thread"])
def test_sigterm_ends_a_process_that_hangs(hangs: str) -> None:
    """A thread that Python waits for at its end hangs, or the event loop, in a call."""
    code = (
        "import sys, threading, time\n"
        "from epd.server import serve\n"
        "from epd.workers import orders\n"
        "orders.CUT_S = orders.CLEANUP_S = orders.GRACE_S = 0.5\n"
        f"hangs = {hangs!r}\n"
        "def hang(config, address):\n"
        "    threading.Thread(target=time.sleep, args=(300,)).start()\n"
        "    serve.structlog.get_logger('epd').info('hangs')\n"
        "    if hangs == 'loop':\n"
        "        time.sleep(300)\n"
        "serve.log_listening = hang\n"
        "from epd.__main__ import main\n"
        "main(sys.argv[1:])\n"
    )
    flags = [*ADDRESS, "--log-format", "json", "--drain-delay-s", "0", "--drain-timeout-s", "0.5"]
    command = [sys.executable, "-c", code, "serve", *INSTANCES, *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while '"hangs"' not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(100) == 1
        finally:
            process.kill()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
@pytest.mark.parametrize("trusted", [True, False])
async def test_media_are_fetched_over_https_only_with_a_trusted_certificate(
    tmp_path: Path, trusted: bool
) -> None:
    pem = await asyncio.to_thread(localhost_certificate, tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem)
    encode, decode, origin = FakeInstance(encodes), FakeInstance(decodes), FakeOrigin()
    async with encode.running(), decode.running(), origin.running(context):
        flags = ["--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url]
        flags += ["--media-fetch", "proxy", "--allowed-media-domains", "localhost"]
        env = {"EPD_ALLOW_PRIVATE_MEDIA": "true"} | ({"SSL_CERT_FILE": str(pem)} if trusted else {})
        with serving(*flags, env=env, executed=True) as (url, process):
            body = request(image(f"https://localhost:{origin.port}/?secret"))
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{url}/v1/chat/completions", json=body) as reply,
            ):
                said = reply.status, reply.headers.get("x-epd-error")
            process.terminate()
            assert process.stderr is not None
            logged = process.stderr.read()

    assert said == ((200, None) if trusted else (422, "media_fetch_failed"))
    sent = [call.parts[0]["image_url"]["url"] for call in encode.calls]
    assert sent == ([data_url(b"picture")] if trusted else [])
    assert "secret" not in logged


def test_a_store_that_hangs_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    """Row 25: an NFS mount hangs like this when its server is gone."""
    code = (
        "import sys, time\n"
        "from ec_store.disk.store import SharedDiskStore\n"
        "SharedDiskStore.namespaces = SharedDiskStore.close = lambda self: time.sleep(120)\n"
        "from epd.__main__ import main\n"
        "main(sys.argv[1:])\n"
    )
    flags = [*ADDRESS, "--log-format", "json", "--drain-delay-s", "0"]
    command = [
        *(sys.executable, "-c", code, "serve", *INSTANCES, *flags),
        *("--ec-store", f"file://{tmp_path}/store"),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while '"listening"' not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(100) == 0
        finally:
            process.kill()
