"""From the journal's records back to the sessions that they tell of."""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from parrot.protocol.engine_client import CoreIdentity
from parrot.serve.core import ServeCore
from parrot.serve.journal.journal import Journal
from parrot.serve.journal.record import RESERVED, Kind, Payload, Record
from parrot.serve.sessions import Begun, Session

logger = logging.getLogger(__name__)


def restore(
    core: ServeCore, journal: Journal, others: Mapping[str, Callable[[str, Payload], None]]
) -> None:
    """Do once more what the records tell, in the event loop and before anything is asked of `core`.
    `others`: by their kinds, what applies records of other subjects than sessions. Raises
    `ConfigError` if the journal cannot be read."""
    restoring = _Restoring(core, {**others, RESERVED: core.sessions.numbers.restore})

    def replay() -> list[Session]:
        journal.read(restoring.apply)
        core.sessions.restored(journal)
        return restoring.broken(journal)

    core.fleet.identity = CoreIdentity.new(journal.epoch)
    with _no_collection():
        core.restore(replay)


@contextmanager
def _no_collection() -> Iterator[None]:
    """All that is made in the block stays: the collector would look at it again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, which is seldom looked at
            gc.enable()


class _Restoring:
    """A subject of which a record cannot be applied is given up; the others come back."""

    def __init__(
        self, core: ServeCore, others: Mapping[str, Callable[[str, Payload], None]]
    ) -> None:
        self._core = core
        self._others = others
        self._broken: set[str] = set()

    def apply(self, record: Record) -> None:
        if record.subject in self._broken:
            return
        try:
            if (apply := self._others.get(record.kind)) is not None:
                apply(record.subject, record.fields())
            else:
                self._apply(int(record.subject), Kind(record.kind), record.fields())
        except Exception:
            logger.exception("%s of the journal cannot be restored", record.subject)
            self._broken.add(record.subject)

    def broken(self, journal: Journal) -> list[Session]:
        """The sessions that are not whole. What else is not is forgotten."""
        sessions: list[Session] = []
        for subject in self._broken:
            session = self._core.sessions.find(int(subject)) if subject.isdecimal() else None
            if session is None:
                journal.end(subject)
            else:
                sessions.append(session)
        return sessions

    def _apply(self, session_id: int, kind: Kind, fields: Payload) -> None:
        core, programs = self._core, self._core.turns.programs
        if kind is Kind.SESSION:
            session = core.sessions.restore(Begun(**fields))
            if fields["is_program"]:
                programs.restore(session)
            return
        known = core.sessions.find(session_id)
        assert known is not None, f"no session {session_id}"
        apply: Callable[[Session, Payload], None]
        match kind:
            case Kind.PROMPT:
                apply = programs.restore_prompt
            case Kind.ENDING:
                apply = core.turns.restore_ending
            case _:
                core.programs.restore(known, kind, fields)
                return
        apply(known, fields)
