"""The socket of a server before it listens, for tests of its address."""

import socket
from typing import Any


def server_socket(host: str, port: int) -> tuple[socket.socket, Any]:
    """A socket for a server, not bound yet, and the address to bind it to. Raises `OSError` for a
    host that cannot be resolved."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, kind, proto)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return server, address
