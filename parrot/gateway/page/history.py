"""The last finished runs. The page and `parrot trace` show them like live sessions."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from parrot.gateway.page.feed import Rows
from parrot.gateway.page.finished import FinishedRun, RunEnd, finishing
from parrot.gateway.page.pending import PendingSessions
from parrot.gateway.page.runs import RowContext
from parrot.gateway.page.visitors import Visitor
from parrot.protocol.errors import ParrotError
from parrot.serve.command_log import CommandLog
from parrot.serve.core import ServeCore
from parrot.serve.sessions import Session
from parrot.utils.heaps import Timer, TimerQueue

logger = logging.getLogger(__name__)

RUN = "run"  # The kind of a journal record with a finished run.
_TENANT_PART = 2  # One tenant gets a half of all bytes.
_RUN_PART = 8  # The texts of one run get an eighth of all bytes.
_JOURNAL_PART = 8  # The history gets an eighth of the journal.
# Seconds until a pending run is taken. With a journal, a crash loses the runs of that time.
_TAKE_S, _TAKE_JOURNALED_S = 5.0, 1.0
_PENDING_UNITS = 256  # Units of work of taking one pending run. A unit is about a microsecond.
_LATE_S = 1.0  # Seconds after a run's maximum age when it is deleted.


class History:
    """Finished runs, bounded by number, age and bytes, with a share of the bytes for each tenant.
    If it is off, no session's end calls it.

    The run of a small session is taken when it is read, or after a few seconds. Until then its
    session is pending."""

    def __init__(self, core: ServeCore) -> None:
        config = core.config
        self._core = core
        self._max_runs = config.history.max_runs if config.page else 0
        self._max_age = config.history.max_age
        self._max_bytes = config.history.size
        if config.journal is not None:
            self._max_bytes = min(self._max_bytes, config.journal_size // _JOURNAL_PART)
        self.context = RowContext.of(core)
        self._epoch = self.context.epoch
        self._timers = TimerQueue(core.clock)
        self._expiry: Timer | None = None
        self._runs: dict[int, FinishedRun] = {}  # the first to end first
        self._groups: dict[tuple[str, str], dict[int, None]] = {}  # ids, in the same order
        self._bytes: Counter[str] = Counter()  # by tenant
        self._unwanted: int | None = None  # The session whose run is not kept.
        self._log: CommandLog | None = None
        self._pending = PendingSessions(self._max_runs)
        self._taking_timer: Timer | None = None
        if self._max_runs:
            core.keepers.append(self.keep)

    def __len__(self) -> int:
        return len(self._taken())

    def __iter__(self) -> Iterator[FinishedRun]:
        return iter(self._taken().values())

    def __contains__(self, run_id: object) -> bool:
        return run_id in self._taken()

    def find(self, run_id: int) -> FinishedRun | None:
        return self._taken().get(run_id)

    def overview(self, visitor: Visitor) -> Rows:
        """The rows of the finished runs that the visitor may see."""
        return {
            f"session:{run.id}": run.listed(sees_values=visitor.sees_values)
            for run in self
            if visitor.tenant in (None, run.tenant)
        }

    def failures(self, visitor: Visitor) -> Rows:
        """An event for each failed run that the visitor may see."""
        rows: dict[str, dict[str, Any]] = {}
        for run in self:
            if run.row["state"] == "failed" and visitor.tenant in (None, run.tenant):
                error = run.row.get("error", "") if visitor.sees_values else ""
                rows[f"event:run {run.id}"] = {
                    "at": run.ended_at,
                    "kind": "run failed",
                    "text": ": ".join(filter(None, (run.row["app"], error))),
                    "engine": "",
                    "session": run.id,
                    "var": "",
                    "has_view": True,
                }
        return rows

    @contextmanager
    def without(self, session_id: int) -> Iterator[None]:
        """Keep no run of this session if it is ended meanwhile."""
        self._unwanted = session_id
        try:
            yield
        finally:
            self._unwanted = None

    def keep(self, session: Session, error: ParrotError) -> Iterator[int]:
        """Steps that keep the run of a session that ends now."""
        graph = session.graph
        if (
            self._core.is_closing
            or not graph.calls
            or session.id == self._unwanted
            or not self._core.tenants.keeps_runs(session.tenant)
        ):
            return iter(())
        was_busy = graph.activation.num_started > 0 and any(
            task.is_started and task.reader_demand
            for call in graph.calls.values()
            for task in call.tasks
        )
        return self._keeping(session, RunEnd(self._now(), error, was_busy))

    def _keeping(self, session: Session, ending: RunEnd) -> Iterator[int]:
        if not self._pending.accepts(session):
            yield from self._taking(session, ending)
            return
        session.keeps_graph = True
        displaced = self._pending.add(session, ending)
        if self._taking_timer is None:
            wait_s = _TAKE_S if self._log is None else _TAKE_JOURNALED_S
            when = self._core.clock.now() + wait_s
            self._taking_timer = self._timers.call_at(when, self._take_pending)
        if displaced is not None:
            yield from displaced.graph.free()

    def _taken(self) -> dict[int, FinishedRun]:
        """All runs, the pending ones included."""
        while self._pending:
            self._take_first()
        return self._runs

    def _take_pending(self) -> None:
        """Take all pending runs in steps, between which other tasks run."""
        self._taking_timer = None

        def steps() -> Iterator[int]:
            while self._pending:
                self._take_first()
                yield _PENDING_UNITS

        self._core.sessions.backlog.add(self, steps())

    def _take_first(self) -> None:
        """Take the run of the pending session that ended first."""
        _, session, ending = self._pending.pop()
        for _ in self._taking(session, ending):
            pass
        self._core.sessions.backlog.add(session.id, session.graph.free())

    def _taking(self, session: Session, ending: RunEnd) -> Iterator[int]:
        try:
            room = self._max_bytes // _RUN_PART
            run = yield from finishing(session, ending, self.context, room)
        except Exception:
            logger.exception("run %s cannot be kept", session.id)
            return
        if (
            self._core.tenants.keeps_runs(run.tenant)
            and run.size <= self._max_bytes // _TENANT_PART
        ):
            self.add(run)

    def add(self, run: FinishedRun) -> None:
        """Keep the run. Other runs are deleted if not all fit."""
        self._insert(run)
        if self._log is not None and not self._log.shortage:
            self._log.append(_subject(run.id), RUN, run.fields())
        self._make_room()

    def delete(self, run_id: int) -> None:
        """Delete the run if it is kept."""
        run = self._runs.pop(run_id, None)
        if run is None:
            return
        group = self._groups[_group(run)]
        del group[run_id]
        if not group:
            del self._groups[_group(run)]
        self._bytes[run.tenant] -= run.size
        if not self._bytes[run.tenant]:
            del self._bytes[run.tenant]
        if self._log is not None:
            self._log.end(_subject(run_id))

    def keys_changed(self) -> None:
        """Delete the runs of tenants that have lost their key, or whose history is off now."""
        for run in list(self):
            if not self._core.tenants.keeps_runs(run.tenant):
                self.delete(run.id)

    @property
    def restorers(self) -> dict[str, Callable[[str, dict[str, Any]], None]]:
        """By record kind, the function that restores a record."""
        return {RUN: lambda _, fields: self._insert(FinishedRun.of_fields(fields))}

    def journal_to(self, journal: CommandLog) -> None:
        """All runs were restored. Apply today's limits, and journal changes from now on."""
        self._log = journal
        self.keys_changed()
        self._make_room()

    async def close(self) -> None:
        self._taken()
        await self._timers.close()

    def check_integrity(self) -> None:
        """Recount the bytes and groups. For tests."""
        recounted: Counter[str] = Counter()
        for run in self:
            recounted[run.tenant] += run.size
        assert recounted == self._bytes, (recounted, self._bytes)
        grouped = [(_group(self._runs[run_id]), run_id) for run_id in self._runs]
        assert sorted(grouped) == sorted((key, n) for key, ids in self._groups.items() for n in ids)
        assert len(self) <= self._max_runs
        assert recounted.total() <= self._max_bytes
        assert max(recounted.values(), default=0) <= self._max_bytes // _TENANT_PART

    def _now(self) -> float:
        return self._epoch + self._core.clock.now()

    def _insert(self, run: FinishedRun) -> None:
        self.delete(run.id)
        self._runs[run.id] = run
        self._groups.setdefault(_group(run), {})[run.id] = None
        self._bytes[run.tenant] += run.size

    def _make_room(self) -> None:
        """Apply all limits, and wait for the next run to become too old."""
        oldest_end = self._now() - self._max_age
        runs = self._runs
        while (
            first := next(iter(runs.values()), None)
        ) is not None and first.ended_at <= oldest_end:
            self.delete(first.id)
        while self._bytes:
            tenant, size = self._bytes.most_common(1)[0]
            has_room = self._bytes.total() <= self._max_bytes
            if has_room and size <= self._max_bytes // _TENANT_PART:
                break
            self.delete(next(run.id for run in runs.values() if run.tenant == tenant))
        while len(runs) > self._max_runs:
            largest = max(self._groups, key=lambda group: len(self._groups[group]))
            self.delete(next(iter(self._groups[largest])))
        self._set_expiry()

    def _set_expiry(self) -> None:
        first = next(iter(self._runs.values()), None)
        if first is not None and self._expiry is None:
            when = first.ended_at + self._max_age + _LATE_S - self._epoch
            self._expiry = self._timers.call_at(when, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self._make_room()


def _group(run: FinishedRun) -> tuple[str, str]:
    """Runs of one group displace each other first. So API requests do not displace programs."""
    return run.tenant, run.row["kind"]


def _subject(run_id: int) -> str:
    return f"run {run_id}"
