"""Sessions: the scope of one program, the commands that change it, and its authentication."""

import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

from parrot.protocol.errors import (
    AuthenticationFailed,
    Cancelled,
    InsufficientStorage,
    NotFound,
    ParrotError,
    QuotaExceeded,
    SessionGone,
    Unavailable,
)
from parrot.protocol.public import (
    CallResponse,
    GraphRequest,
    GraphResponse,
    NativeCallRequest,
    SemanticCallRequest,
)
from parrot.serve.command_log import CommandLog, Fields
from parrot.serve.config import CoreConfig
from parrot.serve.graph.build import Prompt
from parrot.serve.graph.graph import (
    GraphServices,
    ResolvedGraph,
    SessionGraph,
    SessionIds,
    Shared,
    resolve,
)
from parrot.serve.graph.nodes import (
    Completion,
    Executor,
    Predictor,
    SemanticVariable,
    Task,
    VariableState,
)
from parrot.serve.tenants.limits import Quota, num_bytes, usage_of, usage_of_graph
from parrot.serve.tenants.table import TenantTable
from parrot.utils.clock import Clock
from parrot.utils.heaps import Timer, TimerQueue
from parrot.utils.hidden_ids import HiddenIds
from parrot.utils.ids import derived_token, tokens_equal
from parrot.utils.shard import Shard

if TYPE_CHECKING:
    from parrot.utils.spans import TraceSampler

RESERVED = "reserved"  # The kind of a journal record that reserves a block of session ids.
_RESERVED_IDS = 1024  # Session ids per block. A larger number writes fewer records.

Result_co = TypeVar("Result_co", covariant=True)


class Begin(NamedTuple):
    """The facts with which a session begins. They are journaled."""

    id: int
    auth: str
    tenant: str
    apps: Sequence[str]
    on_demand: bool
    trace_id: str
    is_program: bool  # created by the gateway for a program that does not know the session
    client: str = ""  # name of the client that sent the program's first request; empty: unknown


class Command(Protocol[Result_co]):
    """A change of a session by its program. `apply` executes it, also in the replay after a
    restart. `apply` raises the graph's errors, and then has changed nothing."""

    @property
    def usage(self) -> Mapping[str, int]:
        """The amounts that the command adds to the session's quota usage; empty for a command that
        ends something."""
        ...

    def apply(self, session: "Session") -> Result_co: ...


@dataclass(frozen=True, slots=True)
class AddCall:
    request: SemanticCallRequest | NativeCallRequest

    @property
    def usage(self) -> Mapping[str, int]:
        return usage_of(self.request)

    def apply(self, session: "Session") -> CallResponse:
        response = session.graph.submit(self.request)
        session.graph.remember(self.request, response)
        return response


@dataclass(frozen=True, slots=True)
class AddGraph:
    request: GraphRequest
    resolved: ResolvedGraph
    upcoming: Sequence[int]  # the session's next ids before `resolve`, which takes some of them

    @classmethod
    def of(cls, request: GraphRequest, graph: SessionGraph) -> "AddGraph":
        """Raises `InvalidRequest` as `resolve` does."""
        upcoming = graph.ids.upcoming
        return cls(request, resolve(request, graph.session_id, graph.new_variable), upcoming)

    @property
    def usage(self) -> Mapping[str, int]:
        variables, calls = self.resolved.variables, self.resolved.calls
        return usage_of_graph(self.request.variables, len(variables), calls)

    def apply(self, session: "Session") -> GraphResponse:
        variables, calls = self.resolved.variables, self.resolved.calls
        answer = GraphResponse(
            session_id=session.id,
            variables={name: variable.id for name, variable in variables.items()},
            calls=session.graph.submit_all(calls, list(variables.values())),
        )
        session.graph.remember(self.request, answer)
        return answer


@dataclass(frozen=True, slots=True)
class AddPrompt:
    """A call without a template. `apply` returns its id, and a completion for each answer."""

    prompt: Prompt
    usage: Mapping[str, int]
    is_kept: bool  # it continues when the client disconnects, because others may read it

    def apply(self, session: "Session") -> tuple[int, list[Completion]]:
        return session.graph.submit_prompt(self.prompt)


@dataclass(frozen=True, slots=True)
class CreateVariable:
    name: str
    content: str | None

    @property
    def usage(self) -> Mapping[str, int]:
        return {"variables": 1, "text_bytes": num_bytes([self.content or ""])}

    def apply(self, session: "Session") -> SemanticVariable:
        return session.graph.add_variable(self.name, self.content)


@dataclass(frozen=True, slots=True)
class SetVariable:
    var_id: str
    content: str

    @property
    def usage(self) -> Mapping[str, int]:
        return {"text_bytes": num_bytes([self.content])}

    def apply(self, session: "Session") -> None:
        session.graph.set_variable(self.var_id, self.content)


class _Ending:
    """A command that ends something. It is allowed even if the quota is used up."""

    __slots__ = ()

    @property
    def usage(self) -> Mapping[str, int]:
        return {}


@dataclass(frozen=True, slots=True)
class CancelVariable(_Ending):
    var_id: str

    def apply(self, session: "Session") -> None:
        session.graph.cancel_variable(self.var_id)


@dataclass(frozen=True, slots=True)
class CancelCall(_Ending):
    request_id: int

    def apply(self, session: "Session") -> None:
        session.graph.cancel_call(self.request_id)


class SessionLog(Protocol):
    """Records the changes of one session, so that another process can restore it."""

    def began(self, begin: Begin) -> None: ...

    def require_room(self) -> None:
        """Raise `InsufficientStorage` if nothing can be recorded."""
        ...

    def command(
        self, command: Command[Any], upcoming: Sequence[int]
    ) -> AbstractContextManager[None]:
        """Record the command that the block applies, before its effects. If the block raises, the
        record is discarded. `upcoming`: the session's next ids."""
        ...

    def settled(self, variable: SemanticVariable) -> None: ...

    def attempted(self, completion: Completion) -> None:
        """The completion was sent to an engine."""
        ...

    def was_read(self) -> None:
        """A read has to wait, for the first time in this session."""
        ...

    def note(self, kind: str, fields: Fields) -> None:
        """Add a record of another kind, which belongs to the caller."""
        ...

    def ended(self) -> None: ...

    async def stored(self, seq: int) -> None:
        """Wait until the record with this number is on disk. Raises `InsufficientStorage` if it
        cannot be written now."""
        ...


@dataclass(slots=True, eq=False)
class Session:
    id: int
    auth: str
    tenant: str
    apps: tuple[str, ...]
    is_program: bool
    graph: SessionGraph
    account: Quota
    created_at: float  # times are on the clock's scale
    last_active: float  # time of the last request, or of the last end of a task
    client: str = ""  # see `Begin`
    timed_reads: dict[object, float] = field(default_factory=dict)  # open reads, and their timeouts
    was_read: bool = False  # a read has had to wait, so held calls may run
    was_abandoned: bool = False  # a client has left the last read that ended
    is_wake_due: bool = False  # a timer will start the held calls
    keeps_graph: bool = False  # a keeper of runs frees the graph after the session's end
    expiry: Timer | None = None
    log: SessionLog | None = None

    def set_log(self, log: SessionLog | None) -> None:
        """Record changes in this log from now on; None: record nothing."""
        self.log = log
        self.graph.propagation.on_settled = None if log is None else log.settled

    def apply(self, command: Command[Result_co]) -> Result_co:
        """Execute a command of the session's program. Raises `InsufficientStorage` if it cannot be
        journaled, `QuotaExceeded`, and the command's errors. Then nothing has changed."""
        usage = command.usage
        if usage:
            if self.log is not None:
                self.log.require_room()
            self.account.require(**usage)
        if self.log is None:
            result = command.apply(self)
        else:
            with self.log.command(command, self.graph.ids.upcoming):
                result = command.apply(self)
        self.account.add(**usage)
        return result

    def replay(self, command: Command[Result_co]) -> Result_co:
        """Execute a command again that was accepted before a restart."""
        result = command.apply(self)
        self.account.add(**command.usage)
        return result

    def read_began(self) -> None:
        """Note that a read has to wait."""
        if not self.was_read and self.log is not None:
            self.log.was_read()
        self.was_read = True

    def published(
        self, *variables: SemanticVariable, is_kept: bool = True
    ) -> AbstractAsyncContextManager[None]:
        """At the end of the block that reads variables, or at its error, wait until their values
        and errors are on disk. So a restart cannot change what was returned. This also holds if the
        session has ended meanwhile. Raises `InsufficientStorage` if they cannot be written now. Not
        for cancellations, which make room, and unless `is_kept`: then no later request reads them.
        """
        log = self.log
        return nullcontext() if log is None else self._published(log, variables, is_kept)

    @asynccontextmanager
    async def _published(
        self, log: SessionLog, variables: Sequence[SemanticVariable], is_kept: bool
    ) -> AsyncIterator[None]:
        try:
            yield
        except ParrotError as error:
            if self.log is not None:
                is_kept = is_kept and not isinstance(error, Cancelled)
                await _stored(self.log, variables, is_kept)
            raise
        await _stored(log, variables, is_kept)

    def task_finished(self, task: Task, now: float) -> None:
        """Mark the session as active, and count the task's outputs and log probabilities in its
        usage."""
        self.last_active = now
        made = [output.text for output in task.outputs if output.state is VariableState.READY]
        logprobs = task.stats.logprobs if isinstance(task, Completion) else None
        extra = 0 if logprobs is None else logprobs.num_bytes
        self.account.add(text_bytes=num_bytes(made) + extra)

    def expires_at(self, now: float, life_span_s: float) -> float:
        """When the session expires. Running work keeps it alive, and so does an open read until its
        timeout. A read without a timeout does not: if no work runs, its value may never be set."""
        if self.graph.activation.num_started:
            return now + life_span_s
        return max(self.last_active + life_span_s, *self.timed_reads.values(), 0.0)


def _usage_of(apps: Sequence[str]) -> dict[str, int]:
    """The quota usage of a new session."""
    return {"sessions": 1, "text_bytes": num_bytes(apps)}


async def _stored(log: SessionLog, variables: Sequence[SemanticVariable], is_kept: bool) -> None:
    try:
        await log.stored(max(variable.record_seq for variable in variables))
    except InsufficientStorage:
        if is_kept:
            raise


class SessionNumbers:
    """Assigns numbers to sessions, which only grow. Ids are hidden numbers. If `first` is 0, ids
    are the numbers. With a log, numbers are reserved in blocks before their use. A session's auth
    is derived from its id and a secret of the log. So a client of an ended session can be told that
    it has ended, without storing the session."""

    def __init__(self, first: int, shard: Shard | None = None) -> None:
        self._shard = shard
        self._is_hidden = first > 0
        self._step = 1 if shard is None else shard.step
        self.next = self._end = self._aligned(first)
        self._subject = ""  # of the log's last block
        self.use_secret(secrets.token_bytes(32))

    def use_secret(self, secret: bytes) -> None:
        """Derive ids and auths from this secret from now on."""
        self._secret, self._ids = secret, HiddenIds(secret, self._step)
        self.number_of = self._ids.number_of

    def new(self) -> tuple[int, str]:
        """The id and the auth of a new session with the next number."""
        number = self.next
        self.next = self._aligned(number + 1)
        session_id = self._ids.id_of(number) if self._is_hidden else number
        return session_id, self.auth(session_id)

    def auth(self, session_id: int) -> str:
        """The `session_auth` of a session."""
        token = derived_token(self._secret, session_id)
        return token if self._shard is None else token + self._shard.mark

    def mark_used(self, session_id: int) -> None:
        """Mark the id as used: the next number is greater."""
        if session_id >= HiddenIds.FIRST:
            session_id = self.number_of(session_id)
        self.next = max(self.next, self._aligned(session_id + 1))

    def is_auth(self, given: str, session_id: int, known: str | None) -> bool:
        """Whether `given` is the session's auth. `known`: the auth of a live session."""
        return tokens_equal(given, self.auth(session_id) if known is None else known)

    def reserve(self, log: CommandLog) -> None:
        """Make sure that `next` is reserved in the log."""
        if self.next < self._end:
            return
        if self._subject:
            log.end(self._subject)
        self._end = self.next + _RESERVED_IDS * self._step
        self._subject = f"ids below {self._end}"
        log.append(self._subject, RESERVED, {"end": self._end})

    def restore(self, subject: str, fields: Fields) -> None:
        """Continue after a reserved block, because all its ids may have been used."""
        self._subject = subject
        self._end = self.next = self._aligned(max(self.next, fields["end"]))

    def _aligned(self, number: int) -> int:
        """The first id of this shard that is not below `number`."""
        return number if self._shard is None else self._shard.aligned(number)


class SessionRegistry:
    """Owns the live sessions and expires idle ones. Session ids only grow, also over restarts if
    there is a journal. An ending session is no longer found, but its usage counts for its tenant
    until it has ended."""

    def __init__(
        self,
        config: CoreConfig,
        tenants: TenantTable,
        clock: Clock,
        timers: TimerQueue,
        sampler: "TraceSampler | None" = None,
        first_id: int = 0,
    ) -> None:
        """Call `connect` before the first session."""
        self.journal: CommandLog | None = None
        self.dormant: dict[int, Callable[[], None]] = {}
        """Journaled sessions that are not replayed yet, by id, and the function that replays each.
        `find` replays a session first. Iterating shows such a session as it began."""
        self.is_closing = False
        self.sampler = sampler
        self._config = config
        self._tenant_table = tenants
        self._clock = clock
        self._timers = timers
        self._services: GraphServices
        self._expire: Callable[[Session, str], None]
        self._make_log: Callable[[int], SessionLog]
        self.shard = None if config.shards is None else config.shard
        self.numbers = SessionNumbers(first_id, self.shard)
        self._shared = Shared()
        self.backlog = self._shared.backlog
        self._sessions: dict[int, Session] = {}
        self._ending: dict[int, Session] = {}
        self._auths: set[str] = set()
        # A tenant's account lives as long as one of its sessions, whose accounts refer to it.
        self._tenants: WeakValueDictionary[str, Quota] = WeakValueDictionary()

    def connect(
        self, executor: Executor, predictor: Predictor, expire: Callable[[Session, str], None]
    ) -> None:
        """Connect the sessions' graphs. `expire` ends a session for a reason: it calls `retire`,
        and later `remove`."""
        self._services = GraphServices(executor, predictor, self._clock, self.backlog)
        self._expire = expire

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
        client: str = "",
        traceparent: str | None = None,
    ) -> Session:
        """Raises `QuotaExceeded` for too many sessions or too long names in `apps`,
        `InsufficientStorage` if the session cannot be journaled, and `AuthenticationFailed` if the
        tenant's key was removed meanwhile."""
        if not self._tenant_table.is_served(tenant):
            raise AuthenticationFailed(f"{tenant} no longer has a key for sessions")
        if self.journal is not None:
            self.journal.require_room()
            self.numbers.reserve(self.journal)
        limit = self._config.max_sessions_num
        if len(self._sessions) >= limit:
            raise QuotaExceeded(f"{limit} sessions are live already (`max_sessions_num`)")
        account = self._account(tenant)
        usage = _usage_of(apps)
        account.require(**usage)
        trace_id = "" if self.sampler is None else self.sampler.trace_of(traceparent)
        session_id, auth = self.numbers.new()
        begin = Begin(
            session_id,
            auth,
            tenant,
            tuple(apps),
            on_demand,
            trace_id,
            is_program,
            client,
        )
        session = self._begin(begin, account, usage)
        if self.journal is not None:
            log = self._make_log(session.id)
            log.began(begin)
            session.set_log(log)
        return session

    def restore(self, begin: Begin) -> Session:
        """Begin a session again after a restart, in its first state."""
        self.numbers.mark_used(begin.id)
        return self._begin(begin, self._account(begin.tenant), _usage_of(begin.apps))

    @contextmanager
    def replaying(self, session: Session) -> Iterator[None]:
        """Replay a session's records in the block, while other sessions run. The changes are not
        recorded and do not count as activity. No id is assigned twice."""
        log, last_active, tasks = session.log, session.last_active, self._shared.tasks
        number = tasks.upcoming
        session.set_log(None)
        try:
            yield
        finally:
            session.set_log(log)
            session.last_active = last_active
            tasks.upcoming = max(number, tasks.upcoming)

    def keys_changed(self) -> Iterator[None]:
        """Apply the tenants' new limits, and end the sessions of tenants without a key. Yields
        after each session, because there may be thousands."""
        table = self._tenant_table
        for tenant, account in self._tenants.items():
            account.own = table.get(tenant).limits.amounts
        for session in self:
            if not table.is_served(session.tenant) and session.id in self._sessions:
                self._expire(session, "has ended: its tenant no longer has a key for sessions")
                yield

    def _account(self, tenant: str) -> Quota:
        """The account of a new session."""
        of_tenant = self._tenants.get(tenant)
        if of_tenant is None:
            own = self._tenant_table.get(tenant).limits.amounts
            of_tenant = Quota(self._config.tenant_quota, own=own)
            self._tenants[tenant] = of_tenant
        return Quota(self._config.session_quota, of_tenant)

    def placed(self, completion: Completion) -> None:
        """Record that the completion was sent to an engine."""
        session = self.find(completion.session_id)
        if session is not None and session.log is not None:
            session.log.attempted(completion)

    def _begin(self, begin: Begin, account: Quota, usage: Mapping[str, int]) -> Session:
        account.add(**usage)
        now = self._clock.now()
        graph = SessionGraph(
            begin.id,
            begin.tenant,
            SessionIds(self._shared, begin.auth),
            self._services,
            cache_salt=self._tenant_table.cache_salt(begin.tenant),
            on_demand=begin.on_demand,
            trace_id=None if self.sampler is None else begin.trace_id,
        )
        apps = tuple(begin.apps)
        head = (begin.id, begin.auth, begin.tenant, apps, begin.is_program)
        session = Session(*head, graph, account, now, now, client=begin.client)
        self._sessions[begin.id] = session
        self._auths.add(session.auth)
        self._expire_at(session, now + self._config.session_life_span)
        return session

    def restored(self, journal: CommandLog, make_log: Callable[[int], SessionLog]) -> None:
        """All sessions were restored. Record changes from now on. The sessions count as active now,
        because their programs could not reach them before."""
        self.journal = journal
        self._make_log = make_log
        for session in self:
            session.last_active = self._clock.now()
            session.set_log(make_log(session.id))

    def authenticate(self, session_id: int, session_auth: str | None) -> Session:
        """The live session; marks it as active. Raises `AuthenticationFailed` without an auth,
        `NotFound` for a wrong one, `SessionGone`, `Unavailable` while ServeCore shuts down, and
        `ElsewhereError` if another shard owns the session."""
        if not session_auth:
            raise AuthenticationFailed("missing session_auth (`Authorization: Bearer`)")
        if self.shard is not None:
            self.shard.require_session(session_id)
        session = self.find(session_id)
        if session is None and self.is_closing:  # The journal may keep the session.
            raise Unavailable("ServeCore is shutting down")
        known = None if session is None else session.auth
        if not self.numbers.is_auth(session_auth, session_id, known):
            raise NotFound(f"no session {session_id} that has this session_auth")
        if session is None:
            raise SessionGone(f"session {session_id} has expired or was deleted")
        session.last_active = self._clock.now()
        return session

    def is_auth(self, text: str) -> bool:
        """Whether the text is the auth of a live session."""
        return text in self._auths

    def find(self, session_id: int) -> Session | None:
        if session_id in self.dormant:
            self.dormant.pop(session_id)()
        return self._sessions.get(session_id)

    def find_owner(self, session_id: int) -> Session | None:
        """The session, also while it is ending."""
        return self.find(session_id) or self._ending.get(session_id)

    def num_of(self, tenant: str) -> int:
        """The number of the tenant's live sessions."""
        account = self._tenants.get(tenant)
        return 0 if account is None else account.used["sessions"]

    def used_share(self, tenant: str) -> float:
        """The used share of the most used of the tenant's own limits."""
        account = self._tenants.get(tenant)
        return 0.0 if account is None else account.used_share()

    def remaining_s(self, session: Session) -> float:
        """Seconds until the session expires, without further activity."""
        now = self._clock.now()
        return session.expires_at(now, self._config.session_life_span) - now

    def retire(self, session: Session) -> None:
        """Begin the session's end: no request can find it from now on."""
        self.dormant.pop(session.id, None)
        self._ending[session.id] = self._sessions.pop(session.id)
        self._auths.remove(session.auth)
        if session.expiry is not None:
            session.expiry.cancel()

    def remove(self, session: Session) -> None:
        """Finish the session's end: its usage no longer counts for its tenant."""
        del self._ending[session.id]
        session.account.close()

    def check_integrity(self) -> None:
        """Recount graphs and usage. Call it only between turns of the event loop."""
        assert self._auths == {session.auth for session in self}
        totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for session in self:
            session.graph.check_integrity()
        for session in (*self, *self._ending.values()):
            totals[session.tenant].update(session.account.used)
        for tenant, total in totals.items():
            used = Counter(self._tenants[tenant].used)
            assert used == total, (tenant, used, total)

    def _watch(self, session: Session) -> None:
        # Activity does not move the timer. A timer that fires too early is set again.
        self._expire_at(session, self._clock.now() + self.remaining_s(session))

    def _expire_at(self, session: Session, when: float) -> None:
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
