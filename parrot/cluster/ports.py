"""Ports of this machine: which are free, and what answers there."""

import http.client
import json
import random
from contextlib import closing
from typing import Any

from parrot.utils.server_socket import server_socket

# Below the ranges from which Linux (32768) and macOS (49152) take ports for outgoing connections,
# so that no client socket grabs a port between our test and the server's bind.
_FIRST, _END = 10_000, 32_000
_TRIES = 200


def free_port(host: str, taken: set[int], first: int = _FIRST) -> int:
    """A random port, no lower than `first`, that can be bound on `host` now and is not in `taken`;
    it is added there."""
    for _ in range(_TRIES):
        port = random.randrange(first, _END)
        if port not in taken and is_free(host, port):
            taken.add(port)
            return port
    raise OSError(f"found no free port on {host} in {_TRIES} tries")


def is_free(host: str, port: int) -> bool:
    """True if a server could listen on `host`:`port` now."""
    probe, address = server_socket(host, port)
    with probe:
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError:
            return False
    return True


def ask(
    host: str, port: int, path: str, timeout_s: float = 2.0, token: str | None = None
) -> tuple[int, Any] | None:
    """(status, decoded JSON or None) of a GET, or None when nobody answers.

    Plain `http.client`: it ignores proxy settings, and needs no event loop."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with closing(http.client.HTTPConnection(host, port, timeout=timeout_s)) as connection:
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            raw = response.read()
        except (OSError, http.client.HTTPException):
            return None
    try:
        return response.status, json.loads(raw)
    except ValueError:
        return response.status, None
