"""What an attempt's error means for its completion and its engine."""

from enum import Enum, auto

from parrot.protocol.errors import (
    Cancelled,
    EngineFailed,
    InternalError,
    ModelNumerics,
    NotFound,
    OutOfMemory,
    ParrotError,
    PromptTooLong,
    QuotaExceeded,
    TimedOut,
    Unavailable,
)
from parrot.serve.execution.run import Attempt


class Verdict(Enum):
    FAILS = auto()  # running it again would not help
    RUNS_AGAIN = auto()  # preferably elsewhere
    NEEDS_MEMORY = auto()  # again, when the engine's idle contexts are gone
    CONTEXT_IS_LOST = auto()  # again, without the contexts that the engine does not know
    ENGINE_IS_LOST = auto()


def judge(attempt: Attempt, error: ParrotError) -> Verdict:
    """Counts the error against the task, which is given up after a few."""
    task, engine = attempt.task, attempt.engine
    match error:
        case PromptTooLong() if not attempt.is_longest:
            limit = min(engine.info.max_seq_len, engine.info.tokens_capacity)
            task.wanted_len = max(task.wanted_len, limit + 1)
            return Verdict.RUNS_AGAIN
        case ModelNumerics():
            return Verdict.FAILS
        case OutOfMemory():
            verdict = Verdict.NEEDS_MEMORY
            task.num_refused += 1
        case QuotaExceeded():
            verdict = Verdict.RUNS_AGAIN
            task.num_refused += 1
            task.avoided.add(engine.id)
        case NotFound():
            verdict = Verdict.CONTEXT_IS_LOST
            task.num_refused += 1
        case Unavailable():
            return Verdict.ENGINE_IS_LOST
        case EngineFailed() | InternalError() | Cancelled() | TimedOut():
            verdict = Verdict.RUNS_AGAIN
            task.num_lost += 1
            task.avoided.add(engine.id)
        case _:
            return Verdict.FAILS
    return verdict if task.may_run_again else Verdict.FAILS


def final_error(error: ParrotError) -> ParrotError:
    """What the reader gets. An engine's own trouble is never shown as a trouble of ServeCore."""
    match error:
        case OutOfMemory() | QuotaExceeded():
            return error
        case Unavailable() | InternalError() | Cancelled() | TimedOut() | NotFound():
            return EngineFailed(f"no engine could run the completion: {error.message}")
        case _:
            return error
