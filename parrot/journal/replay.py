"""From the journal's records back to the sessions that they tell of."""

import asyncio
import gc
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from parrot.journal.codec import (
    JournaledSession,
    recorded_command,
    replay_attempt,
    replay_settled,
)
from parrot.journal.log import Journal, Kind, Payload, Record
from parrot.protocol.engine_client import CoreIdentity
from parrot.protocol.errors import SessionGone
from parrot.serve.core import ServeCore
from parrot.serve.events import CompletionPlaced
from parrot.serve.execution.fleet import MODEL
from parrot.serve.graph.nodes import VariableState
from parrot.serve.sessions import RESERVED, AddPrompt, Begin, CancelCall, Session
from parrot.serve.tenants.limits import num_bytes

logger = logging.getLogger(__name__)

_NUMBERING = {Kind.CALL, Kind.NATIVE, Kind.GRAPH, Kind.VARIABLE, Kind.PROMPT}  # give ids
_FRAME_BYTES = 1024  # of a record, besides texts
_MAX_LEFT = 64  # records of a session, or KiB of graphs: some milliseconds, or ten
_TURN_S = 0.002


def restore(
    core: ServeCore, journal: Journal, others: Mapping[str, Callable[[str, Payload], None]]
) -> None:
    """Do once more what the records tell, in the event loop and before anything is asked of `core`.
    Sessions with few records come back when they are asked for, or soon, in small steps.
    `others`: by their kinds, what applies records that others wrote down, by their subjects. Raises
    `ConfigError` if the journal cannot be read."""
    applied = {
        **others,
        RESERVED: core.sessions.numbers.restore,
        MODEL: core.fleet.restore_model,
    }
    restoring = _Restoring(core, journal, applied)
    secret = _secret(journal)
    core.fleet.identity = CoreIdentity.new(journal.epoch)
    core.tenants.restored(secret)
    with _no_collection(), _nothing_runs(core):
        journal.read(restoring.apply)
        core.sessions.restored(journal, partial(JournaledSession, journal), secret)
        core.fleet.keep_models(journal)
        restoring.end_broken()
        for _ in core.sessions.keys_changed():
            pass
        core.events.add({CompletionPlaced: lambda event: core.sessions.placed(event.completion)})
        restoring.cancel_orphans()
    for session in core.sessions:
        core.wake_soon(session)
    restoring.leave_dormant()
    _restore_rest(core)


def _secret(journal: Journal) -> bytes:
    """The secret that was made with the journal."""
    words = [journal.fact(f"secret {i}", secrets.randbits(63)) for i in range(4)]
    return b"".join(word.to_bytes(8) for word in words)


@contextmanager
def _nothing_runs(core: ServeCore) -> Iterator[None]:
    """For the block in which all that is told of tasks has happened already. Then goes on what
    ran."""
    core.tasks.hold()
    yield
    core.tasks.go_on()


def _restore_rest(core: ServeCore) -> None:
    """Restore some dormant sessions now, and the rest in later turns of the event loop."""
    end = time.perf_counter() + _TURN_S
    while core.sessions.dormant and not core.is_closing:
        core.sessions.find(next(iter(core.sessions.dormant)))
        if time.perf_counter() > end:
            asyncio.get_running_loop().call_soon(_restore_rest, core)
            return


@contextmanager
def _no_collection() -> Iterator[None]:
    """All that is made in the block stays: the collector would look at it again and again. It
    passes over it from then on if it does over other things (see `Collector`)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            has_frozen = gc.get_freeze_count() > 0
            gc.freeze()
            if not has_frozen:
                gc.unfreeze()  # into the oldest generation, which is seldom looked at
            gc.enable()


def _size(record: Record) -> int:
    """How long it takes to restore: a graph has many calls."""
    return 1 + len(record.payload) // 1024 if record.kind == Kind.GRAPH else 1


class _Restoring:
    """A subject of which a record cannot be applied is given up; the others come back."""

    def __init__(
        self,
        core: ServeCore,
        journal: Journal,
        others: Mapping[str, Callable[[str, Payload], None]],
    ) -> None:
        self._core = core
        self._journal = journal
        self._others = others
        self._broken: set[str] = set()
        self._left: dict[str, list[Record]] = {}  # for later, by their sessions
        self._sizes: Counter[str] = Counter()  # of those
        self._orphans: list[tuple[Session, int]] = []
        self._last = ""  # of these, the session that was given the last ids

    def apply(self, record: Record) -> None:
        if (left := self._left.get(record.subject)) is not None:
            left.append(record)
            if record.kind in _NUMBERING:
                self._last = record.subject
            self._sizes[record.subject] += _size(record)
            if self._sizes[record.subject] > _MAX_LEFT:
                self._restore_left(record.subject)
            return
        self._apply_now(record)

    def end_broken(self) -> None:
        """End the sessions that are not whole. What else is not is forgotten."""
        for subject in self._broken:
            session = self._core.sessions.find(int(subject)) if subject.isdecimal() else None
            if session is None:
                self._journal.end(subject)
            else:
                self._end_broken(session)

    def _end_broken(self, session: Session) -> None:
        self._core.end(session, SessionGone(f"session {session.id} could not be restored"))

    def cancel_orphans(self) -> None:
        """Cancel the calls for which somebody waited: they have gone with their connections."""
        orphans, self._orphans = self._orphans, []
        for session, request_id in orphans:
            if self._core.sessions.find(session.id) is session:
                session.apply(CancelCall(request_id))

    def leave_dormant(self) -> None:
        """See to it that the rest is restored when it is asked for."""
        for subject, records in self._left.items():
            session_id = int(subject)
            session = self._core.sessions.find(session_id)
            if records and session is not None:
                held = _held(records)
                session.account.add(**held)
                wake = partial(self._wake, session_id, records, held)
                self._core.sessions.dormant[session_id] = wake
        if self._last:  # from now on new ids are given
            self._core.sessions.find(int(self._last))

    def _wake(self, session_id: int, records: list[Record], held: Mapping[str, int]) -> None:
        core = self._core
        session = core.sessions.find(session_id)
        assert session is not None, session_id
        session.account.add(**{name: -amount for name, amount in held.items()})

        with _nothing_runs(core):
            with core.sessions.replaying(session):
                self._journal.replay(records, self._apply_now)
            if str(session_id) in self._broken:
                self._end_broken(session)
            self.cancel_orphans()
        if core.sessions.find(session_id) is session:
            core.wake_soon(session)

    def _restore_left(self, subject: str) -> None:
        """There are too many records for one turn of the event loop."""
        session = self._core.sessions.find(int(subject))
        assert session is not None, subject
        with self._core.sessions.replaying(session):
            self._journal.replay(self._left.pop(subject), self._apply_now)

    def _apply_now(self, record: Record) -> None:
        if record.subject in self._broken:
            return
        try:
            if (apply := self._others.get(record.kind)) is not None:
                apply(record.subject, record.fields())
            else:
                self._apply(record.subject, Kind(record.kind), record.fields())
        except Exception:
            logger.exception("%s of the journal cannot be restored", record.subject)
            self._broken.add(record.subject)

    def _apply(self, subject: str, kind: Kind, fields: Payload) -> None:
        sessions = self._core.sessions
        if kind is Kind.SESSION:
            sessions.restore(begin := Begin(**fields))
            if not begin.is_program:  # else others look for what is in it
                self._left[subject] = []
            return
        session = sessions.find(int(subject))
        assert session is not None, f"no session {subject}"
        command = recorded_command(kind, fields, session.graph)
        if command is not None:
            answer = session.replay(command)
            if isinstance(command, AddPrompt) and not command.is_kept:
                self._orphans.append((session, answer[0]))
        elif kind is Kind.SETTLED:
            variable = replay_settled(session.graph, fields)
            if variable.producer is None and variable.state is VariableState.READY:
                session.account.add(text_bytes=num_bytes([variable.text]))
        elif kind is Kind.ATTEMPT:
            replay_attempt(session.graph, fields, self._core.clock)
        elif kind is Kind.READ:
            session.was_read = True


def _held(records: list[Record]) -> dict[str, int]:
    """The amounts that a session counts for in its tenant's quota until it is restored from the
    records: about what it keeps, and rather too little, so that nobody is refused for nothing."""
    asked = [record for record in records if record.kind in _NUMBERING]
    calls = [record for record in asked if record.kind != Kind.VARIABLE]
    graphs = [
        record.payload.count(b'"parameters":') for record in calls if record.kind == Kind.GRAPH
    ]
    outputs = sum(record.payload.count(b'"is_output":true') for record in calls)
    return {
        "calls": len(calls) - len(graphs) + sum(graphs),
        "variables": len(asked) - len(calls) + outputs,
        "text_bytes": sum(max(0, len(record.payload) - _FRAME_BYTES) for record in asked),
    }
