"""Finds free ports of this machine, and sends requests to servers."""

import http.client
import json
import random
from contextlib import closing
from typing import Any

from parrot.utils.server_socket import server_socket

# Ports to try. Linux takes ports for outgoing connections from 32768, and macOS from 49152. Lower
# ports are not taken by a client socket between our test and the server's bind.
_FIRST, _END = 10_000, 32_000
_TRIES = 200  # Random ports to try before an error.


def free_port(host: str, taken: set[int], first: int = _FIRST) -> int:
    """A random free port of `host` that is at least `first` and not in `taken`. It is added to
    `taken`."""
    for _ in range(_TRIES):
        port = random.randrange(first, _END)
        if port not in taken and is_free(host, port):
            taken.add(port)
            return port
    raise OSError(f"found no free port on {host} in {_TRIES} tries")


def is_free(host: str, port: int) -> bool:
    """Whether a server can listen on `host`:`port` now."""
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
    """(status, decoded JSON or None) of a GET request. None without an answer.

    Uses `http.client`, which ignores proxy settings and needs no event loop."""
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
