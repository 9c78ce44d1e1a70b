"""A stand-in for both servers: `python -m fake_server --config_path P [--without_core]`.

Engines register at the core with POST /hello. The core lists them on /ready, including dead ones,
as a real core may for some seconds. Config keys control the server: `die_after_s`, `exit_code`,
`stubborn`, `silent`, `loading`, `with_child`, `drains` (until the second signal)."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

config = json.loads(Path(sys.argv[sys.argv.index("--config_path") + 1]).read_text())
engines: list[dict[str, object]] = []
engine_ids = itertools.count()
alone = "--without_core" in sys.argv


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/ready" and (config.get("loading") or not (engines or alone)):
            self._answer({"error": {"type": "no_engine"}}, status=503)
        else:
            self._answer({"num_queued": 0, "engines": engines})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/hello":
            engines[:] = [e for e in engines if e["engine_name"] != body["engine_name"]]
            engines.append(body | {"engine_id": next(engine_ids)})
        self._answer({})

    def _answer(self, payload: object, status: int = 200) -> None:
        raw = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *args: object) -> None: ...


def say_hello() -> None:
    core = config["serve_core"]
    body = {
        **{key: config[key] for key in ("engine_name", "host", "port")},
        "engine_type": "sim",
        "model": "m",
    }
    request = urllib.request.Request(
        f"http://{core['host']}:{core['port']}/hello", data=json.dumps(body).encode()
    )
    for _ in range(100):
        try:
            urllib.request.urlopen(request).read()
        except OSError:
            threading.Event().wait(0.02)
        else:
            return


print("argv", sys.argv[3:], "stdin", repr(sys.stdin.read()), "token", config.get("cluster_token"))
if "exit_code" in config:
    print("I give up: the model is broken")
    sys.exit(config["exit_code"])
if config.get("stubborn"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if config.get("drains"):
    num_asked = itertools.count()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if next(num_asked) else print("draining"))
    print("up")
if config.get("with_child"):
    print("grandchild", subprocess.Popen(["sleep", "600"]).pid)
server = ThreadingHTTPServer((config["host"], config["port"]), Handler)
if "serve_core" in config and not config.get("silent"):
    threading.Thread(target=say_hello, daemon=True).start()
if "die_after_s" in config:
    threading.Timer(config["die_after_s"], os._exit, (7,)).start()
server.serve_forever()
