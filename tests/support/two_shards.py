"""Checks over HTTP that two running ServeCores are shards of one service."""

import json
import urllib.request
from typing import Any

from parrot.cluster.ports import ask
from parrot.utils.shard import MAX_SHARDS


def check_shards(ports: tuple[int, int], key: str) -> None:
    """Each ServeCore creates sessions with its own index, and forwards requests for sessions of the
    other."""
    for index, (port, other) in enumerate((ports, ports[::-1])):
        session = _new_session(port, key)
        assert session["session_id"] % MAX_SHARDS == index
        path = f"/v1/session/{session['session_id']}"
        answer = ask("127.0.0.1", other, path, token=session["session_auth"])
        assert answer is not None
        assert answer[0] == 200


def _new_session(port: int, key: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/session",
        b"{}",
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        scope: dict[str, Any] = json.loads(answer.read())
    return scope
