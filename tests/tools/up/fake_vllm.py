"""Fake `vllm` command: serves until it is told to stop, or fails as `--fake` says."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ANSWER = {"choices": [{"message": {"role": "assistant", "content": "a fake answer"}}]}


EVENT = {"choices": [{"index": 0, "delta": {"content": "a"}}]}
streams = threading.Semaphore(0)
"""Semaphore that is released once for each stream that has ended."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("stream"):
            self.stream()
        else:
            self.answer(json.dumps(ANSWER).encode())

    def stream(self) -> None:
        """Send tokens until the client disconnects."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        event = f"data: {json.dumps(EVENT)}\n\n".encode()
        try:
            while True:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
                time.sleep(0.05)
        except ConnectionError:
            streams.release()
            raise

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Suppress the access log: tests look at the end of the log."""


class Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Suppress errors of clients that send a request and disconnect."""


PROFILE_S = 2.0


class Device:
    """Memory of a device, as a folder that has a file for each allocation of a process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / os.environ["CUDA_VISIBLE_DEVICES"]
        self._folder.mkdir(parents=True, exist_ok=True)

    def allocate(self, what: str) -> None:
        (self._folder / f"{what}-{os.getpid()}").touch()

    def others(self) -> set[str]:
        """Return the allocations of other processes."""
        found = {path.name for path in self._folder.iterdir()}
        return {name for name in found if not name.endswith(f"-{os.getpid()}")}

    def start_engine(self) -> None:
        """Allocate as vLLM does; exit as it does if a neighbour allocates while it measures."""
        if "ec_producer" in " ".join(sys.argv):
            self.allocate("weights")
            time.sleep(PROFILE_S)  # the process of the API prepares media on the device
            self.allocate("processor")
            return
        before = self.others()
        self.allocate("weights")
        until_s = time.monotonic() + PROFILE_S
        while time.monotonic() < until_s:
            if self.others() != before:
                print("(EngineCore pid=7) ValueError: No available memory for the cache blocks.")
                sys.exit("RuntimeError: Engine core initialization failed.")
            time.sleep(0.01)
        self.allocate("kv-cache")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--fake", default="")
    parser.add_argument("--fake-record", type=Path)
    parser.add_argument("--fake-devices", type=Path)
    args, _ = parser.parse_known_args()
    if args.fake_record is not None:
        seen = {"argv": sys.argv[1:], "environ": dict(os.environ)}
        (args.fake_record / f"{args.port}.json").write_text(json.dumps(seen))
        return
    print("INFO 11-21 17:53:40 [fake.py:71] Loading what is not there", flush=True)
    if args.fake == "fail":
        sys.exit("this model is too strange")
    # Like vLLM's EngineCore: a separate process, which its parent ends on SIGTERM.
    core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def end(*_: object) -> None:
        core.kill()
        sys.exit()

    signal.signal(signal.SIGTERM, end)
    if args.fake == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.fake == "patient":  # like vLLM, wait for running streams
        signal.signal(signal.SIGTERM, lambda *_: end(streams.acquire()))
    if args.fake == "slow":
        time.sleep(600)
    if args.fake_devices is not None:
        Device(args.fake_devices).start_engine()
    Server(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
