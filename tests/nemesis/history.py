"""The history of a run: what programs asked, what they were told, and when.

Times are seconds of one clock. Requests that change something have a key, and may be sent again;
each time that one is sent is a record of its own."""

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
"""Errors of a request that say nothing about the variable: the same request may come again. All
others are the variable's own, for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request of a program, from `invoked` to `answered`; None: there was no answer, and the
    client gave up. `error`: the type of the error; empty: it succeeded."""

    program: int
    invoked: float
    answered: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit(Asked):
    """A call. `inputs` and `outputs`: ids of variables, the latter empty if there was no answer.
    `prompt`: what it begins with, as far as the program knows it. `fails`: it cannot succeed.
    `is_sampled`: each run of it has another value."""

    key: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    prompt: str | None = None
    fails: bool = False
    is_sampled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(Asked):
    """A read of a variable. `limit_s`: within which the server has to answer. `pieces`: of a
    stream, those that came before its end or its error. `cached_tokens`: of the prompt, if told."""

    var: str
    limit_s: float
    text: str | None = None
    pieces: tuple[str, ...] | None = None
    cached_tokens: int | None = None

    @property
    def is_own_error(self) -> bool:
        """Whether it got an error that the variable has for ever."""
        return bool(self.error) and self.error not in TRANSIENT and self.error not in GONE


@dataclass(frozen=True, slots=True, kw_only=True)
class SetValue(Asked):
    """The program gives a variable its value, of which `digest` is `digest_of`."""

    var: str
    digest: str

    @property
    def is_acknowledged(self) -> bool:
        """Whether the program was told that the variable has a value: this one, or, of a request
        that was sent again, one that was sent before."""
        return self.answered is not None and self.error in ("", "already_set")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Asked):
    var: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Close(Asked):
    """The program ends its session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCall:
    """A call as the service shows it; times are since the session began."""

    outputs: tuple[str, ...]
    state: str
    attempts: int = 0
    started_s: float | None = None
    finished_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All calls of a program, when it had all its answers."""

    program: int
    calls: tuple[SeenCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A program from its beginning to its end; `ended` None: it never came to one. `result`: its
    answer, and `expected` that of an undisturbed run."""

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
    """A fault. `loses_engine`: a call that ran then may have lost its engine."""

    fault: str
    target: str
    began: float
    ended: float
    loses_engine: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A server's own account in the end. `left`: what is still there and should not be; `broken`:
    what its recount of its books found."""

    server: str
    left: dict[str, int]
    broken: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredCall:
    """A call that an engine's process answered, from its arrival there to its answer. ServeCore
    counts it for the engine at least that long."""

    engine: str
    process: int
    tenant: str
    began: float
    ended: float


@dataclass(slots=True)
class History:
    """`share`: calls that a tenant may always have in the queue, whatever others do. `patience_s`:
    within which a call of a tenant with no more than that is done when nothing disturbs.
    `tasks_capacity`: calls that ServeCore may place on an engine at once."""

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
        """Whether there was a time in which what was told could not be written down: the disk was
        full, or there was no way to the database."""
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
