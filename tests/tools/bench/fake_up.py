"""Fake `epd up`, or example proxy: one server that answers as an engine does.

An answer depends on the request. The variable FAKE_UP has its behaviour, by topology: `slow`, which
takes 0.1 s longer, `strange`, which answers something else, `failing`, `short`, which answers with
one token, `cold`, which fails warm-ups, `dying`, which ends, `endless`, which answers nothing,
`lingering`, which ends late, or `broken`, which does not start.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behaviour, has_store = "", False

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.behaviour == "slow":
            time.sleep(0.1)
        if self.behaviour == "endless":
            time.sleep(600)
        asked = json.loads(body)
        warm_up = "warm-up" in json.dumps(asked["messages"])[:100]
        failing = self.behaviour == ("cold" if warm_up else "failing")
        if self.behaviour == "dying" and not warm_up:
            os._exit(3)
        salt = b"strange" if self.behaviour == "strange" else b""
        letters = hashlib.sha256(body + salt).hexdigest()[: asked["max_tokens"]]
        if self.behaviour == "short" and not warm_up:
            letters = letters[:1]
        events = [
            {"choices": [{"logprobs": {"content": [{"token": letter, "logprob": -1.0}]}}]}
            for letter in letters
        ]
        usage = {"prompt_tokens": 7, "completion_tokens": len(letters), "total_tokens": 7}
        answer = [*events, {"choices": [], "usage": usage}]
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in answer) + "data: [DONE]\n\n"
        content = b"it fails" if failing else lines.encode()
        self.send_response(500 if failing else 200)
        if self.has_store:
            self.send_header("x-epd-items", "hit=1,encoded=0,local=0")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Suppress the access log."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--topology")
    parser.add_argument("--port", type=int, default=0)
    args, _ = parser.parse_known_args()
    behaviour = json.loads(os.environ.get("FAKE_UP", "{}")).get(args.topology, "")
    print("argv", json.dumps(sys.argv[1:]))
    if behaviour == "broken":
        sys.exit("it does not start")
    Handler.behaviour, Handler.has_store = behaviour, args.topology != "1pd"
    server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    url = f"http://127.0.0.1:{server.server_port}"

    def end(*_: object) -> None:
        print("ending", flush=True)
        time.sleep(3 if behaviour == "lingering" else 0)
        print("ended", flush=True)
        sys.exit()

    signal.signal(signal.SIGTERM, end)
    print(f"starting encode-8200: {url}/e, log in x")
    print(f"starting prefill-decode-8400: {url}, log in x\n\nready: {url}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
