"""One short blocking question to a server on this machine."""

import http.client
import json
from typing import Any


def ask(
    host: str, port: int, method: str, path: str, timeout_s: float = 2.0
) -> tuple[int, Any] | None:
    """(status, decoded JSON or None) of an exchange, or None when nobody answers.

    Plain `http.client`: it ignores proxy settings, and needs no event loop."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, body=b"{}" if method == "POST" else None, headers=headers)
        response = connection.getresponse()
        return response.status, _decode(response.read())
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _decode(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None
