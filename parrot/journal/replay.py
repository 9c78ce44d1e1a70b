"""Restores the sessions from the journal's records."""

import asyncio
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
from parrot.protocol.public import SemanticCallRequest
from parrot.serve.core import ServeCore
from parrot.serve.events import CompletionPlaced
from parrot.serve.execution.fleet import MODEL
from parrot.serve.graph.nodes import VariableState
from parrot.serve.sessions import RESERVED, AddCall, AddPrompt, Begin, CancelCall, Session
from parrot.serve.tenants.limits import num_bytes
from parrot.utils.collector import no_collections

logger = logging.getLogger(__name__)

_NUMBERING = {Kind.CALL, Kind.NATIVE, Kind.GRAPH, Kind.VARIABLE, Kind.PROMPT}  # They assign ids.
_FRAME_BYTES = 1024  # Estimated bytes of a record without its texts.
# Records of a dormant session (or KiB, for a graph). Replaying this many takes about 10 ms at once.
_MAX_DEFERRED = 64
_TURN_S = 0.002  # Seconds per turn of the event loop for restoring dormant sessions.


def restore(
    core: ServeCore, journal: Journal, others: Mapping[str, Callable[[str, Payload], None]]
) -> None:
    """Replay the records in the event loop, before `core` receives its first request.

    A session with up to 64 records becomes dormant: it is restored on its first use, or soon, in
    small steps. `others`: by record kind, a function that applies a subject's records of other
    writers. Raises `ConfigError` if the journal cannot be read."""
    applied = {
        **others,
        RESERVED: core.sessions.numbers.restore,
        MODEL: core.fleet.restore_model,
    }
    restoring = _Restoring(core, journal, applied)
    secret = _secret(journal)
    core.fleet.identity = CoreIdentity.new(journal.epoch)
    core.sessions.numbers.use_secret(secret)
    core.tenants.restored(secret, _names_secret(journal, core.tenants.names_secret))
    began = time.perf_counter()
    with no_collections(), _tasks_on_hold(core):
        journal.read(restoring.apply)
        core.sessions.restored(journal, partial(JournaledSession, journal))
        core.fleet.record_models(journal)
        restoring.end_broken()
        for _ in core.sessions.keys_changed():
            pass
        core.events.add({CompletionPlaced: lambda event: core.sessions.placed(event.completion)})
        restoring.cancel_orphans()
    for session in core.sessions:
        core.wake_soon(session)
    restoring.leave_dormant()
    restoring.report(time.perf_counter() - began)
    _restore_dormant(core)


def _secret(journal: Journal) -> bytes:
    """The journal's secret, created with the journal."""
    words = [journal.fact(f"secret {i}", secrets.randbits(63)) for i in range(4)]
    return b"".join(word.to_bytes(8) for word in words)


def _names_secret(journal: Journal, default: bytes) -> bytes:
    """The secret of tenants' names: `default` at the time of the first start with this journal."""
    words = [int.from_bytes(default[start : start + 8]) >> 1 for start in range(0, 32, 8)]
    known = [journal.fact(f"names {i}", word) for i, word in enumerate(words)]
    return b"".join(word.to_bytes(8) for word in known)


@contextmanager
def _tasks_on_hold(core: ServeCore) -> Iterator[None]:
    """Start no task in the block, because the replayed tasks have run before. After the block, the
    unfinished tasks start."""
    core.tasks.hold()
    yield
    core.tasks.resume()


def _restore_dormant(core: ServeCore) -> None:
    """Restore some dormant sessions now, and the rest in later turns of the event loop."""
    end = time.perf_counter() + _TURN_S
    while core.sessions.dormant and not core.is_closing:
        core.sessions.find(next(iter(core.sessions.dormant)))
        if time.perf_counter() > end:
            asyncio.get_running_loop().call_soon(_restore_dormant, core)
            return


def _size(record: Record) -> int:
    """The relative cost of restoring a record. A graph has many calls."""
    return 1 + len(record.payload) // 1024 if record.kind == Kind.GRAPH else 1


class _Restoring:
    """Applies records. A subject with an invalid record is ended, and the others are restored."""

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
        self._counts: Counter[str] = Counter()  # records by kind
        self._deferred: dict[str, list[Record]] = {}  # records to replay later, by session
        self._sizes: Counter[str] = Counter()  # the sum of `_size` of these records
        self._orphans: list[tuple[Session, int]] = []  # calls whose clients are disconnected
        self._last = ""  # the session in `_deferred` that received the last ids

    def apply(self, record: Record) -> None:
        self._counts[record.kind] += 1
        if (left := self._deferred.get(record.subject)) is not None:
            left.append(record)
            if record.kind in _NUMBERING:
                self._last = record.subject
            self._sizes[record.subject] += _size(record)
            if self._sizes[record.subject] > _MAX_DEFERRED:
                self._restore_deferred(record.subject)
            return
        self._apply_now(record)

    def report(self, took_s: float) -> None:
        """Log what the journal contains, and how long the restore took."""
        counts, core = self._counts, self._core
        calls = sum(counts[kind] for kind in (Kind.CALL, Kind.NATIVE, Kind.PROMPT, Kind.GRAPH))
        logger.info(
            "journal: restored %d sessions (%d dormant), %d calls and graphs, %d values, "
            "%d responses, %d finished runs from %d records in %.3f s; %d sessions or responses "
            "are broken; epoch %d",
            len(core.sessions),
            len(core.sessions.dormant),
            calls,
            counts[Kind.SETTLED],
            counts["response"],
            counts["run"],
            counts.total(),
            took_s,
            len(self._broken),
            self._journal.epoch,
        )

    def end_broken(self) -> None:
        """End the sessions that could not be restored, and remove other broken subjects."""
        for subject in self._broken:
            session = self._core.sessions.find(int(subject)) if subject.isdecimal() else None
            if session is None:
                self._journal.end(subject)
            else:
                self._end_broken(session)

    def _end_broken(self, session: Session) -> None:
        self._core.end(session, SessionGone(f"session {session.id} could not be restored"))

    def cancel_orphans(self) -> None:
        """Cancel the calls that only a connection waited for: the connections are closed."""
        orphans, self._orphans = self._orphans, []
        for session, request_id in orphans:
            if self._core.sessions.find(session.id) is session:
                session.apply(CancelCall(request_id))

    def leave_dormant(self) -> None:
        """Register the remaining sessions as dormant, to be restored on their first use."""
        for subject, records in self._deferred.items():
            session_id = int(subject)
            session = self._core.sessions.find(session_id)
            if records and session is not None:
                held = _held(records)
                session.account.add(**held)
                wake = partial(self._wake, session_id, records, held)
                self._core.sessions.dormant[session_id] = wake
        if self._last:  # New ids must not repeat the last ones.
            self._core.sessions.find(int(self._last))

    def _wake(self, session_id: int, records: list[Record], held: Mapping[str, int]) -> None:
        core = self._core
        session = core.sessions.find(session_id)
        assert session is not None, session_id
        session.account.add(**{name: -amount for name, amount in held.items()})

        with _tasks_on_hold(core):
            with core.sessions.replaying(session):
                self._journal.replay(records, self._apply_now)
            if str(session_id) in self._broken:
                self._end_broken(session)
            self.cancel_orphans()
        if core.sessions.find(session_id) is session:
            core.wake_soon(session)

    def _restore_deferred(self, subject: str) -> None:
        """Replay the session now. More records would take too long in one turn later."""
        session = self._core.sessions.find(int(subject))
        assert session is not None, subject
        with self._core.sessions.replaying(session):
            self._journal.replay(self._deferred.pop(subject), self._apply_now)

    def _apply_now(self, record: Record) -> None:
        if record.subject in self._broken:
            return
        try:
            fields = record.fields()
            for owned in (fields, fields.get("options")):
                if isinstance(owned, dict) and "tenant" in owned:
                    owned["tenant"] = self._core.tenants.current_id(owned["tenant"])
            if (apply := self._others.get(record.kind)) is not None:
                apply(record.subject, fields)
            else:
                self._apply(record.subject, Kind(record.kind), fields)
        except Exception:
            logger.exception("journal: subject %s cannot be restored", record.subject)
            self._broken.add(record.subject)

    def _apply(self, subject: str, kind: Kind, fields: Payload) -> None:
        sessions = self._core.sessions
        if kind is Kind.SESSION:
            sessions.restore(begin := Begin(**fields))
            if not begin.is_program:  # The gateway searches program sessions, so they are restored.
                self._deferred[subject] = []
            return
        session = sessions.find(int(subject))
        assert session is not None, f"no session {subject}"
        command = recorded_command(kind, fields, session.graph)
        if command is not None:
            answer = session.replay(command)
            if isinstance(command, AddCall) and isinstance(command.request, SemanticCallRequest):
                self._core.fleet.expect(command.request.models)
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
    """The usage that counts for the tenant's quota until the session is restored. It is estimated
    from the records and rather too low, so that no request is rejected without need."""
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
