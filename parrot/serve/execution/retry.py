"""What a run's error means for its completion."""

from enum import Enum, auto

from parrot.protocol.errors import (
    CallFailed,
    EngineFailed,
    InvalidRequest,
    ModelNumerics,
    NotFound,
    OutOfMemory,
    ParrotError,
    PromptTooLong,
    QuotaExceeded,
    Unavailable,
)
from parrot.serve.execution.engines import Engine
from parrot.serve.execution.run import Attempt, Run


class Verdict(Enum):
    FAILS = auto()  # running it again would not help
    RUNS_AGAIN = auto()  # preferably elsewhere
    NEEDS_MEMORY = auto()  # again, when the engine's idle contexts are gone
    CONTEXT_IS_LOST = auto()  # again, without the contexts that the engine does not know


def is_broken(error: ParrotError) -> bool:
    """Whether the engine may be dead, which only a ping can tell: one connection that was reset
    says nothing of the others."""
    return isinstance(error, Unavailable) and not isinstance(error, OutOfMemory)


def judge(run: Run, attempt: Attempt, error: ParrotError) -> Verdict:
    """Counts the error against the run, which is given up after a few."""
    engine = attempt.engine
    match error:
        case PromptTooLong() if not attempt.is_longest:
            limit = min(engine.info.max_seq_len, engine.info.tokens_capacity)
            run.wanted_len = max(run.wanted_len, limit + 1)
            return Verdict.RUNS_AGAIN
        case ModelNumerics() | InvalidRequest():
            return Verdict.FAILS
        case OutOfMemory():
            verdict = Verdict.NEEDS_MEMORY
            run.num_refused += 1
        case QuotaExceeded():
            verdict = Verdict.RUNS_AGAIN
            run.num_refused += 1
            run.avoided.add(engine.id)
        case NotFound():
            verdict = Verdict.CONTEXT_IS_LOST
            run.num_refused += 1
        case _:
            verdict = Verdict.RUNS_AGAIN
            run.num_lost += 1
            run.avoided.add(engine.id)
    return verdict if run.may_run_again else Verdict.FAILS


def final_error(engine: Engine, error: ParrotError) -> ParrotError:
    """The error that the reader gets. What is between ServeCore and the engine (a token, a size, a
    connection) is never shown as the reader's own fault or as a trouble of ServeCore."""
    match error:
        case CallFailed() | InvalidRequest() | OutOfMemory() | QuotaExceeded():
            return error
        case _:
            name = engine.info.engine_name
            return EngineFailed(f"engine {name} could not run the completion: {error.message}")
