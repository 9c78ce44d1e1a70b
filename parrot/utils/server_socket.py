"""The socket of a server before it listens: whether its address is free, and the message if not."""

import errno
import socket
from typing import Any


def in_use(host: str, port: int) -> str:
    """The message for a port on which another server listens."""
    return (
        f"port {port} of {host} is in use: check with `parrot ping` whether a server answers, or "
        "choose another port with --port or with `port` in the config"
    )


def is_in_use(host: str, port: int) -> bool:
    """Whether another server listens on the port. The probe does not listen, because clients would
    connect to it and lose their connection. Raises `OSError` if the host is not of this machine."""
    probe, address = server_socket(host, port)
    with probe:
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise
    return False


def server_socket(host: str, port: int) -> tuple[socket.socket, Any]:
    """An unbound server socket, and the address to bind. Raises `OSError` if the host cannot be
    resolved."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, kind, proto)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return server, address
