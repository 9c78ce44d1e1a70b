"""The socket of a server before it listens. Used to test whether an address is free."""

import socket
from typing import Any


def server_socket(host: str, port: int) -> tuple[socket.socket, Any]:
    """An unbound server socket, and the address to bind. Raises `OSError` if the host cannot be
    resolved."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, kind, proto)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return server, address
