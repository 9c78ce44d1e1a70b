"""A check of two running ServeCores from outside: they are shards of each other."""

import json
import urllib.request
from typing import Any

from parrot.cluster.ports import ask
from parrot.utils.shard import MAX_SHARDS


def check_shards(ports: tuple[int, int], key: str) -> None:
    """Each begins sessions of its own index, and hands on what asks for the other's."""
    for index, (port, other) in enumerate((ports, ports[::-1])):
        session = _begun_session(port, key)
        assert session["session_id"] % MAX_SHARDS == index
        path = f"/v1/session/{session['session_id']}"
        answer = ask("127.0.0.1", other, path, token=session["session_auth"])
        assert answer is not None
        assert answer[0] == 200


def _begun_session(port: int, key: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/session",
        b"{}",
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        scope: dict[str, Any] = json.loads(answer.read())
    return scope
