"""The history of a run: the requests of programs, with their answers and times.

Times are seconds of one clock. Requests that change state have a key and may be repeated. Each
attempt is a separate record."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

CLOCK_STEP = "clock-step"
CLOCK_BACK = "clock-back"
CLOCK_STEPS = frozenset({CLOCK_STEP, CLOCK_BACK})
DISK_FULL = "disk-full"
GIVEN_UP = frozenset({"engine_failed", "call_failed"})
"""Errors of calls that have lost too many engines."""
GONE = frozenset({"not_found", "session_gone"})
TRANSIENT = frozenset(
    {
        *("unavailable", "timed_out", "insufficient_storage", "standby", "no_engine"),
        *("queue_full", "cluster_full", "quota_exceeded"),
    }
)
"""Errors of a request that do not belong to the variable, so that the request may be repeated. All
other errors are permanent errors of the variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A request of a program. `answered` is None if the client gave up without an answer. `error`
    is the type of the error, and empty if the request succeeded."""

    program: int
    invoked: float
    answered: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit(Attempt):
    """A submitted call. `inputs` and `outputs` are ids of variables; `outputs` is empty without an
    answer. `prompt` is the constant prefix of the prompt. A call with `fails` cannot succeed. With
    `is_sampled`, each run of the call has a different value."""

    key: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    prompt: str | None = None
    fails: bool = False
    is_sampled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(Attempt):
    """A read of a variable. The server has to answer within `limit_s` seconds. `pieces` are the
    chunks of a stream before its end or error. `cached_tokens` is None if not reported."""

    var: str
    limit_s: float
    text: str | None = None
    pieces: tuple[str, ...] | None = None
    cached_tokens: int | None = None

    @property
    def is_own_error(self) -> bool:
        """Whether the read got a permanent error of the variable."""
        return bool(self.error) and self.error not in TRANSIENT and self.error not in GONE


@dataclass(frozen=True, slots=True, kw_only=True)
class SetValue(Attempt):
    """The program sets a variable. `digest` is `digest_of` the value."""

    var: str
    digest: str

    @property
    def is_acknowledged(self) -> bool:
        """Whether the answer says that the variable has a value. After a repeated request, that may
        be the value of an earlier attempt."""
        return self.answered is not None and self.error in ("", "already_set")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Attempt):
    var: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Close(Attempt):
    """The program ends its session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCall:
    """A call as the service shows it. Times are seconds since the session began."""

    outputs: tuple[str, ...]
    state: str
    attempts: int = 0
    started_s: float | None = None
    finished_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All calls of a program, at its end."""

    program: int
    calls: tuple[SeenCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A run of a program. `ended` is None if it hung. `expected` is the result without faults."""

    program: int
    kind: str
    tenant: str
    began: float
    ended: float | None
    limit_s: float
    expected: str
    result: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """An injected fault. With `loses_engine`, calls that ran during it may have lost their
    engine."""

    fault: str
    target: str
    began: float
    ended: float
    loses_engine: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A server's internal state at the end. `left` counts objects that should have been freed.
    `broken` is the error of its integrity check."""

    server: str
    left: dict[str, int]
    broken: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredCall:
    """A call that an engine's process answered, with the times of its arrival and answer. ServeCore
    counts the call for the engine at least from one to the other."""

    engine: str
    process: int
    tenant: str
    began: float
    ended: float


@dataclass(slots=True)
class History:
    """All records of a run.

    A tenant may always have `share` calls in the queue. Without faults, each of these calls ends
    within `patience_s` seconds. ServeCore may place `tasks_capacity` calls on an engine at once."""

    lives: list[Life] = field(default_factory=list)
    submits: list[Submit] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    sets: list[SetValue] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    closes: list[Close] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    disturbances: list[Disturbance] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)
    answered_calls: list[AnsweredCall] = field(default_factory=list)
    tasks_capacity: int = 2**31
    share: int = 2**31
    patience_s: float = 1e9

    @property
    def may_be_unwritten(self) -> bool:
        """Whether the journal was unavailable at some time: the disk was full, or the database was
        unreachable."""
        faults = {one.fault for one in self.disturbances}
        return any(fault.startswith("disk-full") or "database" in fault for fault in faults)

    def save(self, path: Path) -> None:
        path.write_bytes(_ADAPTER.dump_json(self))

    @staticmethod
    def load(path: Path) -> "History":
        return _ADAPTER.validate_json(path.read_bytes())


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


_ADAPTER: TypeAdapter[History] = TypeAdapter(History)
