"""The log that records all changes of ServeCore, such as the journal, as ServeCore uses it."""

from typing import Any, Protocol

Fields = dict[str, Any]


class CommandLog(Protocol):
    """Records all changes (`parrot.journal`). A subject is a session or another object."""

    @property
    def trouble(self) -> str:
        """Why records cannot be written; empty if they can."""
        ...

    @property
    def shortage(self) -> str:
        """Why new work is rejected; empty if it is accepted."""
        ...

    def require_room(self) -> None: ...

    def append(self, subject: str, kind: str, fields: Fields) -> int:
        """Add a record, and return its number."""
        ...

    def end(self, subject: str) -> None:
        """Record that the subject has ended."""
        ...

    async def writable(self) -> None:
        """Wait until new work is accepted."""
        ...

    async def stored(self, seq: int) -> None: ...

    async def durable(self) -> None:
        """Wait until all records are on disk. Raises `InsufficientStorage`."""
        ...

    async def published(self) -> None: ...
