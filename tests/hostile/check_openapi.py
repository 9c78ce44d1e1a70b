"""Run schemathesis on both OpenAPI pages: no answer is a 5xx, and the page describes each answer.

    pip install schemathesis  # into any environment
    python -m tests.hostile.check_openapi [--st PATH] [--max-examples 25] [--seed 1]

The command starts a ServeCore and a simulated engine, and runs `st` on each. `st` also loads this
file as its hooks. They insert an existing model and session and limit output lengths, so that
requests pass the first checks and reach the code after them."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,response_headers_conformance"
)
CORE_PORT, ENGINE_PORT = 19871, 19872
MODEL = "sim"
_CORE = "PARROT_CHECKED_CORE"  # Environment variable of `st` with the address of ServeCore.
_SHORT = {
    "/v1/chat/completions": ("max_tokens", 4),
    "/v1/completions": ("max_tokens", 4),
    "/v1/messages": ("max_tokens", 4),
    "/v1/responses": ("max_output_tokens", 16),
}


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
    )
    answer: dict[str, Any] = json.load(urllib.request.urlopen(request))
    return answer


def known_fields(core: str) -> dict[str, Any]:
    """Return the fields whose values must exist."""
    return post(f"{core}/v1/session", {}) | {"model": MODEL, "models": [MODEL]}


def fitted(body: Any, path: str, known: dict[str, Any]) -> Any:
    """Return the body with values that exist."""
    if not isinstance(body, dict):
        return body
    body |= {name: value for name, value in known.items() if name in body}
    if path in _SHORT:
        name, most = _SHORT[path]
        body = {k: v for k, v in body.items() if not k.startswith("max_")} | {name: most}
        body["model"] = MODEL
        if "messages" in body:
            body["messages"] = [{"role": "user", "content": "Hi"}]
    if isinstance(sampling := body.get("sampling_config"), dict):
        sampling["max_gen_length"] = 4
    return body


if _CORE in os.environ:
    import schemathesis

    KNOWN = known_fields(os.environ[_CORE])

    @schemathesis.hook
    def map_body(context: Any, body: Any) -> Any:
        return fitted(body, context.operation.path, KNOWN)

    @schemathesis.hook
    def map_query(context: Any, query: Any) -> Any:
        return None if query is None else {**query, **{k: KNOWN[k] for k in query if k in KNOWN}}


@contextmanager
def server(module: str, config: dict[str, Any], folder: Path) -> Iterator[str]:
    """Start a server process and yield its address when it is ready."""
    path = folder / f"{module}.json"
    path.write_text(json.dumps({"host": "127.0.0.1", "insecure": True, **config}))
    with subprocess.Popen([sys.executable, "-m", module, "--config_path", str(path)]) as process:
        try:
            url = f"http://127.0.0.1:{config['port']}"
            for _ in range(300):
                try:
                    urllib.request.urlopen(f"{url}/health")
                    break
                except (urllib.error.URLError, ConnectionError):
                    time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--st", default="st", help="path of schemathesis's command")
    parser.add_argument("--max-examples", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    core_config = {"port": CORE_PORT}
    engine_config = {
        "engine_type": "sim",
        "port": ENGINE_PORT,
        "serve_core": {"host": "127.0.0.1", "port": CORE_PORT},
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        core = stack.enter_context(server("parrot.server.http_server", core_config, folder))
        engine = stack.enter_context(server("parrot.engine.http_server", engine_config, folder))
        while json.load(urllib.request.urlopen(f"{core}/v1/models"))["data"] == []:
            time.sleep(0.1)
        failed = 0
        for url in (core, engine):
            failed += subprocess.run(
                [args.st, "run", f"{url}/openapi.json", "--phases", "fuzzing", "--checks", CHECKS,
                 "--max-examples", str(args.max_examples), "--seed", str(args.seed),
                 "--request-timeout", "20", "--continue-on-failure"],
                cwd=folder,  # `st` writes its database there
                env=os.environ | {_CORE: core, "SCHEMATHESIS_HOOKS": "tests.hostile.check_openapi",
                                  "PYTHONPATH": str(ROOT)},
            ).returncode != 0  # fmt: skip
    return failed


if __name__ == "__main__":
    sys.exit(main())
