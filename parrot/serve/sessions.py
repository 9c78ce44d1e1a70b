"""Sessions: one user program's scope, and who may use it."""

import os
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakValueDictionary

from pydantic import BaseModel

from parrot.protocol.errors import (
    AuthenticationFailed,
    NotFound,
    ParrotError,
    QuotaExceeded,
    SessionGone,
    Unavailable,
)
from parrot.serve.config import CoreConfig
from parrot.serve.graph.build import Prompt
from parrot.serve.graph.graph import SessionGraph, SessionIds, Shared
from parrot.serve.graph.nodes import Completion, Predictor, Runner, Task
from parrot.serve.graph.variable import SemanticVariable, VariableState
from parrot.serve.journal.history import History, SessionNumbers
from parrot.serve.journal.journal import Journal
from parrot.serve.tenants.quotas import Account, num_bytes
from parrot.serve.tenants.table import TenantTable
from parrot.utils.clock import Clock
from parrot.utils.timers import Timer, TimerQueue
from parrot.utils.traces.sampling import sampler_of

_NOT_WRITTEN: AbstractContextManager[None] = nullcontext()


class Begun(NamedTuple):
    """The facts that a session begins with. `is_program`: its program knows nothing of it."""

    id: int
    auth: str
    tenant: str
    apps: Sequence[str]
    on_demand: bool
    trace_id: str
    is_program: bool


@dataclass(slots=True, eq=False)
class Session:
    """`last_active`: when a request came in, or a task of the session ended. `timed_reads`: the
    open reads with a timeout, and when they end. Times are on the clock's scale. `was_read`: a read
    has had to wait, so what the program holds may run; `is_wake_due`: it will be woken soon.
    `history`: where what happens is written down, if it is."""

    id: int
    auth: str
    tenant: str
    apps: tuple[str, ...]
    graph: SessionGraph
    account: Account
    created_at: float
    last_active: float
    timed_reads: dict[object, float] = field(default_factory=dict)
    was_read: bool = False
    is_wake_due: bool = False
    expiry: Timer | None = None
    history: History | None = None

    def follow(self, history: History | None) -> None:
        """Write down what happens from now on."""
        self.history = history
        self.graph.flow.on_settled = None if history is None else history.settled

    def require_room(self) -> None:
        """Raise `InsufficientStorage` if nothing can be written down."""
        if self.history is not None:
            self.history.require_room()

    def read_began(self) -> None:
        """A read has to wait."""
        if not self.was_read and self.history is not None:
            self.history.was_read()
        self.was_read = True

    @asynccontextmanager
    async def published(self) -> AsyncIterator[None]:
        """For the block that waits for a value: its end, be it an error, is told when what led to
        it is on disk, so that a restart cannot take it back: neither a value whose session has
        ended meanwhile."""
        history = self.history
        try:
            yield
        except ParrotError:
            if self.history is not None:
                await self.history.published()
            raise
        if history is not None:
            await history.published()

    def written(self, kind: str, request: BaseModel) -> AbstractContextManager[None]:
        """For the block in which a request changes the graph: written down before what follows from
        it, unless the block raises."""
        history = self.history
        return _NOT_WRITTEN if history is None else history.asked(kind, self.graph, request)

    def add_variable(self, name: str, content: str | None) -> SemanticVariable:
        if self.history is not None:
            self.history.created(self.graph, name, content)
        return self.graph.add_variable(name, content)

    def submit_prompt(
        self, prompt: Prompt, usage: Mapping[str, int], *, is_kept: bool
    ) -> tuple[int, list[Completion]]:
        """Add it to the graph and the account; returns and raises as `SessionGraph.submit_prompt`
        does. Not `is_kept`: nobody but who waits for it can want it."""
        history = self.history
        with (
            _NOT_WRITTEN
            if history is None
            else history.prompted(self.graph, prompt, usage, is_kept=is_kept)
        ):
            answer = self.graph.submit_prompt(prompt)
        self.account.add(**usage)
        return answer

    def task_finished(self, task: Task, now: float) -> None:
        """Count the end of one of its tasks as activity, and as kept the texts that it made and how
        likely they were."""
        self.last_active = now
        made = [output.text for output in task.outputs if output.state is VariableState.READY]
        logprobs = task.stats.logprobs if isinstance(task, Completion) else None
        extra = 0 if logprobs is None else logprobs.num_bytes
        self.account.add(text_bytes=num_bytes(made) + extra)

    def expires_at(self, now: float, life_span_s: float) -> float:
        """Running work and an open read until its timeout count as activity. A read without a
        timeout does not: if nothing runs for it, its value will hardly come any more."""
        if self.graph.activation.num_started:
            return now + life_span_s
        return max(self.last_active + life_span_s, *self.timed_reads.values(), 0.0)


class SessionRegistry:
    """The live sessions. Ids only grow; with a journal they grow over restarts, too, whatever the
    clock says then. Whoever has the auth of one that has ended is told so, and nobody else.

    `dormant` has those that a journal tells of, by their ids, and what restores each: whoever finds
    one has it restored first, and who looks at all sees them as they began.

    One that is ending is none of them, but what it keeps counts for its tenant until it has ended.

    A session ends when it has been idle for its life span. Activity moves no timer: a timer that
    comes too early is set again for the time that holds by then."""

    def __init__(
        self,
        config: CoreConfig,
        tenants: TenantTable,
        clock: Clock,
        timers: TimerQueue,
        runner: Runner,
        predictor: Predictor,
        expire: Callable[[Session, str], None],
        first_id: int = 0,
    ) -> None:
        """`expire` ends a session for a reason, which includes `retire` and, in time, `remove`.
        Raises `ConfigError` if the environment names a sampler that nobody knows."""
        self.journal: Journal | None = None
        self.dormant: dict[int, Callable[[], None]] = {}
        self.is_closing = False
        self.sampler = None
        if config.otlp_endpoint is not None:
            self.sampler = sampler_of(config.otlp_sample_ratio, os.environ)
        self._config = config
        self._tenant_table = tenants
        self._clock = clock
        self._timers = timers
        self._runner = runner
        self._predictor = predictor
        self._expire = expire
        self.shard = config.shard
        self.numbers = SessionNumbers(first_id, self.shard)
        self._shared = Shared()
        self.backlog = self._shared.backlog
        self._sessions: dict[int, Session] = {}
        self._ending: dict[int, Session] = {}
        self._auths: set[str] = set()
        # A tenant's account lives as long as one of its sessions, whose accounts refer to it.
        self._tenants: WeakValueDictionary[str, Account] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def create(
        self,
        tenant: str,
        apps: Sequence[str],
        *,
        on_demand: bool = False,
        is_program: bool = False,
        traceparent: str | None = None,
    ) -> Session:
        """Raises `QuotaExceeded` when all sessions are taken, or the names of `apps` too long,
        `InsufficientStorage` if it cannot be written down, and `AuthenticationFailed` for a tenant
        whose key was removed since it asked."""
        if not self._tenant_table.is_served(tenant):
            raise AuthenticationFailed(f"{tenant} has no key for sessions any more")
        if self.journal is not None:
            self.journal.require_room()
            self.numbers.reserve(self.journal)
        limit = self._config.max_sessions_num
        if len(self._sessions) >= limit:
            raise QuotaExceeded(f"{limit} sessions are live already (`max_sessions_num`)")
        account = self._account(tenant)
        account.require(sessions=1, text_bytes=num_bytes(apps))
        trace_id = "" if self.sampler is None else self.sampler.trace_of(traceparent)
        begun = Begun(
            self.numbers.next,
            self.numbers.auth(self.numbers.next),
            tenant,
            tuple(apps),
            on_demand,
            trace_id,
            is_program,
        )
        session = self._begin(begun, account)
        if self.journal is not None:
            history = History(self.journal, session.id)
            history.began(begun._asdict())
            session.follow(history)
        return session

    def restore(self, begun: Begun) -> Session:
        """Begin a session once more, in the state that it began in."""
        return self._begin(begun, self._account(begun.tenant))

    @contextmanager
    def replaying(self, session: Session) -> Iterator[None]:
        """For the block in which all that happened to a session is done once more, though others
        have gone on: nothing of it is written down or counts as active, and no id comes again."""
        history, last_active, ids = session.history, session.last_active, self._shared
        numbers = ids.tasks.upcoming, ids.requests.upcoming
        session.follow(None)
        try:
            yield
        finally:
            session.follow(history)
            session.last_active = last_active
            ids.tasks.upcoming = max(numbers[0], ids.tasks.upcoming)
            ids.requests.upcoming = max(numbers[1], ids.requests.upcoming)

    def keys_changed(self) -> Iterator[None]:
        """Let tenants have other limits from now on, and end the sessions of those who have no key
        for them any more, one with each step: there may be thousands."""
        table = self._tenant_table
        for tenant, account in self._tenants.items():
            account.own = table.get(tenant).limits.amounts
        for session in self:
            if not table.is_served(session.tenant) and session.id in self._sessions:
                self._expire(session, "has ended: its tenant has no key for it any more")
                yield

    def _account(self, tenant: str) -> Account:
        """A new session's."""
        of_tenant = self._tenants.get(tenant)
        if of_tenant is None:
            own = self._tenant_table.get(tenant).limits.amounts
            of_tenant = Account(self._config.tenant_quota, own=own)
        return Account(self._config.session_quota, of_tenant)

    def placed(self, completion: Completion) -> None:
        """It was sent to an engine."""
        session = self.find(completion.session_id)
        if session is not None and session.history is not None:
            session.history.attempted(completion)

    def _begin(self, begun: Begun, account: Account) -> Session:
        assert account.parent is not None
        account.add(sessions=1, text_bytes=num_bytes(begun.apps))
        self._tenants[begun.tenant] = account.parent
        self.numbers.taken(begun.id)
        now = self._clock.now()
        graph = SessionGraph(
            begun.id,
            begun.tenant,
            cache_salt=self._tenant_table.cache_salt(begun.tenant),
            on_demand=begun.on_demand,
            trace_id=begun.trace_id,
            runner=self._runner,
            predictor=self._predictor,
            clock=self._clock,
            ids=SessionIds(self._shared, begun.auth),
            backlog=self.backlog,
        )
        session = Session(
            begun.id, begun.auth, begun.tenant, tuple(begun.apps), graph, account, now, now
        )
        self._sessions[begun.id] = session
        self._auths.add(session.auth)
        self._watch(session)
        return session

    def restored(self, journal: Journal) -> None:
        """All are as they were. What happens from now on is written down, and now is when they were
        last active: their programs could not reach them."""
        self.journal = journal
        self.numbers.keep_in(journal)
        for session in self:
            session.last_active = self._clock.now()
            session.follow(History(journal, session.id))

    def authenticate(self, session_id: int, session_auth: str | None) -> Session:
        """The live session, which counts as active now. Raises `AuthenticationFailed` without an
        auth, `NotFound` if that is not the session's, `SessionGone`, and `Unavailable` when the
        service is going down, and `ElsewhereError` if another shard has it."""
        if not session_auth:
            raise AuthenticationFailed("missing session_auth (`Authorization: Bearer`)")
        self.shard.require_session(session_id)
        session = self.find(session_id)
        if session is None and self.is_closing:  # a journal may have it
            raise Unavailable("ServeCore is shutting down")
        known = None if session is None else session.auth
        if not self.numbers.is_auth(session_auth, session_id, known):
            raise NotFound(f"no session {session_id} that has this session_auth")
        if session is None:
            raise SessionGone(f"session {session_id} has expired or was deleted")
        session.last_active = self._clock.now()
        return session

    def is_auth(self, text: str) -> bool:
        """Whether it is that of any live session."""
        return text in self._auths

    def find(self, session_id: int) -> Session | None:
        if session_id in self.dormant:
            self.dormant.pop(session_id)()
        return self._sessions.get(session_id)

    def find_owner(self, session_id: int) -> Session | None:
        """The session, which may be ending."""
        return self.find(session_id) or self._ending.get(session_id)

    def num_of(self, tenant: str) -> int:
        """The tenant's live sessions."""
        account = self._tenants.get(tenant)
        return 0 if account is None else account.used["sessions"]

    def remaining_s(self, session: Session) -> float:
        """Seconds until it expires, if nothing happens in it."""
        now = self._clock.now()
        return session.expires_at(now, self._config.session_life_span) - now

    def retire(self, session: Session) -> None:
        """It ends: nobody may ask for anything in it any more."""
        self.dormant.pop(session.id, None)
        self._ending[session.id] = self._sessions.pop(session.id)
        self._auths.remove(session.auth)
        if session.expiry is not None:
            session.expiry.cancel()

    def remove(self, session: Session) -> None:
        """It has ended: its tenant has room again for what it kept."""
        del self._ending[session.id]
        session.account.close()

    def check_integrity(self) -> None:
        """Recount the graphs, and what tenants keep. Only between events of the loop."""
        assert self._auths == {session.auth for session in self}
        totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for session in self:
            session.graph.check_integrity()
        for session in (*self, *self._ending.values()):
            totals[session.tenant].update(session.account.used)
        for tenant, total in totals.items():
            assert self._tenants[tenant].used == total, (tenant, self._tenants[tenant].used, total)

    def _watch(self, session: Session) -> None:
        when = self._clock.now() + self.remaining_s(session)
        session.expiry = self._timers.call_at(when, lambda: self._check(session))

    def _check(self, session: Session) -> None:
        if session.id in self.dormant:
            session.last_active = self._clock.now()
            if self.find(session.id) is not None:
                self._watch(session)
        elif self.remaining_s(session) <= 0:
            self._expire(session, "has expired")
        else:
            self._watch(session)
