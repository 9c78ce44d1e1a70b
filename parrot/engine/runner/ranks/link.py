"""A private way between rank 0 and another rank: messages both ways, and word of the other's end.

It is a pair of sockets without a name, of which each process holds one: nobody else can reach it,
and however a process ends, the kernel closes its own."""

import select
import socket
from contextlib import suppress

_LENGTH_BYTES = 8
_BUFFER = 1 << 20  # room for the messages of some steps, so that telling one waits for nobody


class Link:
    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._end = end
        self._reader = end.makefile("rb")

    @classmethod
    def pair(cls) -> "tuple[Link, socket.socket]":
        """A link, and what the other process makes its own of."""
        own, other = socket.socketpair()
        return cls(own), other

    def send(self, message: bytes) -> None:
        """Raises `OSError` if the other has ended."""
        self._end.sendall(len(message).to_bytes(_LENGTH_BYTES, "little") + message)

    def receive(self) -> bytearray:
        """Wait for the next message. Raises `EOFError` if the other has ended."""
        length = int.from_bytes(self._read(_LENGTH_BYTES), "little")
        return self._read(length)

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        try:
            count = self._reader.readinto(data)
        except OSError:
            count = 0
        if count < length:
            raise EOFError("the other rank has ended")
        return data

    def wait_for_message(self, timeout_s: float) -> bool:
        """Whether there is something to `receive`, or the end. For the first message."""
        waiting = select.poll()
        waiting.register(self._end, select.POLLIN)
        return bool(waiting.poll(timeout_s * 1e3))

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """Return True when the other has ended, or this link; False after `timeout_s`."""
        waiting = select.poll()
        waiting.register(self._end, 0)  # an end is told always, messages are not
        return bool(waiting.poll(None if timeout_s is None else timeout_s * 1e3))

    def end(self) -> None:
        """Let both sides see the end, in whatever they wait for. May be called twice."""
        with suppress(OSError):  # the other may have closed it before
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """To be called when nobody waits any more."""
        self._reader.close()
        self._end.close()
