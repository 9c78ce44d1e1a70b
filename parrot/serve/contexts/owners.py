"""Who has which contexts: sessions and tenants."""

from collections.abc import Mapping

from parrot.serve.contexts.index import Context, Room
from parrot.utils.heaps import LruDict


class Owners:
    """The contexts by owner: a session has them until it ends, a tenant until nobody has used them
    for long. What sessions have is promised to them in `rooms`, by engine."""

    def __init__(self, rooms: Mapping[int, Room]) -> None:
        self._rooms = rooms
        self._sizes: dict[int, int] = {}  # of sessions' contexts
        self._by_session: dict[int, dict[int, Context]] = {}
        self._of_tenants: LruDict[int, Context] = LruDict()

    def add(self, context: Context, size: int) -> None:
        if isinstance(context.owner, int):
            self._by_session.setdefault(context.owner, {})[context.id] = context
            self._sizes[context.id] = 0
            self.resized(context, size)
        else:
            self._of_tenants.put(context.id, context)

    def resized(self, context: Context, added: int) -> None:
        if context.id in self._sizes:
            self._sizes[context.id] += added
            if (room := self._rooms.get(context.engine_id)) is not None:
                room.promised += added

    def remove(self, context: Context) -> None:
        if isinstance(context.owner, str):
            self._of_tenants.pop(context.id)
            return
        self.resized(context, -self._sizes[context.id])
        del self._sizes[context.id]
        owned = self._by_session[context.owner]
        del owned[context.id]
        if not owned:
            del self._by_session[context.owner]

    def share(self, context: Context, tenant: str) -> None:
        """Leave a session's context to its tenant: others want it, too."""
        if isinstance(context.owner, int):
            self.remove(context)
            context.owner = tenant
            self.add(context, 0)

    def of_session(self, session_id: int) -> list[Context]:
        """The session's contexts in the order in which they became its."""
        return list(self._by_session.get(session_id, {}).values())

    def is_of(self, context: Context, session_id: int) -> bool:
        return context.id in self._by_session.get(session_id, {})

    def touch(self, context: Context) -> None:
        """If it is a tenant's, it is the last to expire."""
        if isinstance(context.owner, str):
            self._of_tenants.touch(context.id)

    def oldest_of_tenants(self) -> Context | None:
        oldest = self._of_tenants.oldest()
        return None if oldest is None else oldest[1]

    def contexts(self) -> list[Context]:
        """The contexts of all owners."""
        of_sessions = [c for owned in self._by_session.values() for c in owned.values()]
        return of_sessions + list(self._of_tenants.values())

    def context_ids(self) -> set[int]:
        return set(self._of_tenants).union(*self._by_session.values())

    def check_integrity(self, sizes: Mapping[Context, int]) -> None:
        """Recount by the sizes of all contexts. Raises AssertionError with what differs."""
        assert self.context_ids() == {context.id for context in sizes}, self.context_ids()
        promised = dict.fromkeys(self._rooms, 0)
        for context, size in sizes.items():
            if isinstance(context.owner, int) and context.engine_id in promised:
                promised[context.engine_id] += size
        assert promised == {engine_id: room.promised for engine_id, room in self._rooms.items()}
