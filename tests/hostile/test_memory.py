"""After each attack, ServeCore's memory is as before. `python -m tests.hostile.test_memory` runs
each attack 30 times and prints the memory before and after it."""

import http.client
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from tests.hostile.attacked import Attacked, attacked
from tests.hostile.attacks import TEXTS, VENDORS, WORD, M, made, packed

LEFT_BEHIND = 1.1
# These attacks leave conversations, which are kept until they expire.
KEPT = ("most turns", "special tokens", "parts", "a schema")
ROUNDS = 30  # Repetitions of each attack in the long version.

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and trims glibc's")


def send(path: str, raw: bytes, server: Attacked) -> None:
    assert server.ask("POST", path, raw)[0] in (200, 400, 413), path


def vendor(name: str) -> Callable[[Attacked], None]:
    return lambda server: send("/v1/chat/completions", VENDORS[name](), server)


def text(name: str) -> Callable[[Attacked], None]:
    path, payload = TEXTS[name]
    return lambda server: send(path, packed(payload).replace(b'"max_tokens": 2, ', b""), server)


class Session:
    def __init__(self, server: Attacked) -> None:
        self._server = server
        self._scope = server.ask("POST", "/v1/session", b"{}")[1]
        self._token = self._scope["session_auth"]

    def post(self, path: str, **payload: object) -> int:
        raw = json.dumps(self._scope | payload, ensure_ascii=False).encode()
        return self._server.ask("POST", path, raw, self._token)[0]

    def end(self) -> None:
        path = f"/v1/session/{self._scope['session_id']}"
        assert self._server.ask("DELETE", path, None, self._token)[0] == 200


def variables(server: Attacked) -> None:
    session = Session(server)
    for value in (WORD * (2 * M), "\U0001f600" * (2 * M)):
        assert session.post("/v1/semantic_var", var_name="x", content=value) == 200
    session.end()


def calls(server: Attacked) -> None:
    """Submit calls whose outputs are not read."""
    session = Session(server)
    call = {"template": "{{a}}{{b}}", "parameters": [{"name": "a", "var": "v"}, made("b")]}
    for _ in range(4):
        graph = {"variables": [{"name": "v"}], "calls": [call] * 512}
        assert session.post("/v1/semantic_graph", **graph) == 200
    session.end()


def sessions(server: Attacked) -> None:
    for _ in range(40):
        Session(server).end()


def unfinished_bodies(server: Attacked) -> None:
    for _ in range(8):
        with closing(http.client.HTTPConnection(server.url, timeout=60)) as connection:
            connection.putrequest("POST", "/v1/chat/completions")
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(16 * M))
            connection.endheaders(b"[" * (4 * M))


def unknown_names(server: Attacked) -> None:
    """Request models and responses that do not exist."""
    for number in range(40):
        raw = packed({"model": f"m{number}" * 20, "messages": [{"role": "user", "content": "a"}]})
        assert server.ask("POST", "/v1/chat/completions", raw, f"key-{number}")[0] == 404
        assert server.ask("GET", f"/v1/responses/resp_{number}", None)[0] == 404


ATTACKS: dict[str, Callable[[Attacked], None]] = {
    "variables": variables,
    "calls": calls,
    "sessions": sessions,
    "unfinished bodies": unfinished_bodies,
    "unknown names": unknown_names,
} | {name: vendor(name) for name in VENDORS if name not in KEPT}
SLOW = {name: text(name) for name, (path, _) in TEXTS.items() if path != "/v1/completions"}
QUICK = (
    *("variables", "calls", "sessions", "unfinished bodies", "unknown names"),
    *("lists", "one text", "wide text", "more turns"),
)


_LOOKS = 30  # A server can be busy with a request for a moment after its answer.


@pytest.fixture(scope="module")
def server() -> Iterator[Attacked]:
    with attacked() as server:
        yield server


@pytest.mark.parametrize("name", QUICK)
def test_memory_is_freed(server: Attacked, name: str) -> None:
    """The second attack leaves no memory. The first one may: it fills pools and caches."""
    for _ in range(2):
        before = server.memory()
        ATTACKS[name](server)
        for _ in range(_LOOKS):
            after = server.memory()
            if after < LEFT_BEHIND * before:
                return
            time.sleep(0.1)
    pytest.fail(f"{before} bytes before, {after} after")


def main() -> None:
    with attacked() as server:
        for name, attack in (ATTACKS | SLOW).items():
            attack(server)
            before = server.memory()
            for _ in range(ROUNDS):
                attack(server)
            after = server.memory()
            sizes = f"{before / M:7.1f} MiB {after / M:7.1f} MiB {after / before:6.3f}"
            sys.stdout.write(f"{name:20} {sizes}\n")
            assert after < LEFT_BEHIND * before, name


if __name__ == "__main__":
    main()
