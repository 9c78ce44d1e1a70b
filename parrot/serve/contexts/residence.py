"""Where an engine with a host tier has the KV of its contexts: on the device, or on the host.

An engine gives way as contexts were used, the oldest first and their forks before them, and so does
this: it knows as much as can be known without asking. Sizes are in tokens."""

from collections.abc import Callable

from parrot.serve.contexts.index import Context


class Residence:
    """The contexts on one engine's device, up to its `capacity`. All others are on its host."""

    def __init__(self, capacity: int, size: Callable[[Context], int]) -> None:
        self._capacity = capacity
        self._size = size
        self._sizes: dict[Context, int] = {}  # of those on the device, the one used last at the end
        self._used = 0

    def use(self, context: Context) -> None:
        """A run reads all of it and of what it was forked from, or has changed its size."""
        for link in context.lineage():
            self.forget(link)
            self._sizes[link] = size = self._size(link)
            self._used += size
            link.on_host = False
        self._trim()

    def resize(self, capacity: int) -> None:
        self._capacity = capacity
        self._trim()

    def _trim(self) -> None:
        while self._used > self._capacity and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            self.forget(oldest)
            oldest.on_host = True

    def forget(self, context: Context) -> None:
        """It is gone, or is not on the device."""
        self._used -= self._sizes.pop(context, 0)

    def check_integrity(self) -> None:
        assert self._used == sum(self._sizes.values()), (self._used, self._sizes)
        assert self._used <= self._capacity or len(self._sizes) == 1, self._used
        assert not any(context.on_host for context in self._sizes), self._sizes
