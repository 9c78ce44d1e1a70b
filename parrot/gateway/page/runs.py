"""The rows of the list of runs: client, function, totals, last request and timeline of a run."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from parrot.gateway.page.attempts import AttemptLog
from parrot.protocol.errors import Cancelled, ParrotError
from parrot.serve.core import ServeCore
from parrot.serve.graph.nodes import (
    Completion,
    CompletionState,
    PieceKind,
    Task,
    TextPiece,
)
from parrot.serve.metrics import PriceTable
from parrot.serve.sessions import Session
from parrot.serve.views import count_fields

Row = dict[str, Any]

_MAX_CALLS = 1024  # The last calls of a session are shown.
_MAX_NAMED_CALLS, _MAX_NAMES = 64, 3  # A session without an application has these functions' names.
_MAX_WORDS = 80  # Characters of a prompt in the list of runs.
_MAX_ERROR = 300  # Characters of an error in the list of runs.
_MAX_SCANNED = 2048  # Characters of a prompt in which its first words are searched.
_MAX_BARS, _MAX_LANES = 24, 4  # Size of a run's shape.
_SHAPE_UNITS = 100  # A shape's times are in hundredths of the run.
# The part of a shape that is reserved for the calls that still run.
_RUNNING_PART = 0.1
# The state of a bar is the first one of these that one of its calls has.
_SHOWN_STATES = (
    CompletionState.FAILED,
    CompletionState.RUNNING,
    CompletionState.QUEUED,
    CompletionState.CANCELLED,
    CompletionState.DONE,
)


class RowContext(NamedTuple):
    """The facts of a ServeCore that rows of its sessions need."""

    epoch: float  # the clock's zero as Unix time
    name_of: Callable[[str], str]  # the name of a tenant for people
    prices: PriceTable | None  # None: no cost is computed
    attempts: AttemptLog

    @classmethod
    def of(cls, core: ServeCore) -> "RowContext":
        """The facts of this core. From now on its failed attempts are remembered."""
        attempts = AttemptLog(core.clock)
        core.events.add(attempts.sink)
        epoch = time.time() - core.clock.now()
        return cls(epoch, core.tenants.name_of, core.prices, attempts)


def head_row(session: Session, context: RowContext) -> Row:
    """The facts of a session that do not change, except for `kind`."""
    app = session.apps[0] if session.apps else session.client
    return {
        "id": session.id,
        "tenant": context.name_of(session.tenant),
        "apps": list(session.apps),
        "app": app,
        "kind": _kind(session),
        "created_at": round(context.epoch + session.created_at, 3),
    }


def _kind(session: Session) -> str:
    """`API`: requests of a client that has no session. `agent`: a program in which a call continues
    the conversation of an earlier call. `program`: any other."""
    if session.is_program:
        return "API"
    for call in session.graph.calls.values():
        first = call.tasks[0] if call.tasks else None
        if isinstance(first, Completion) and first.previous is not None:
            return "agent"
    return "program"


def sum_row(session: Session, context: RowContext) -> Row:
    """The session's sums, the names of its first functions, its last words, and its shape. A call
    that failed because another one was cancelled is cancelled."""
    counts = count_fields(session)
    tasks = [task for call in session.graph.calls.values() for task in call.tasks]
    names = dict.fromkeys(task.func_name for task in islice(tasks, _MAX_NAMED_CALLS))
    counts["functions"] = list(islice(filter(None, names), _MAX_NAMES))
    if counts["failed"]:
        failed = [task for task in tasks if task.state is CompletionState.FAILED]
        stopped = sum(map(was_stopped, failed))
        counts["failed"] -= stopped
        counts["cancelled"] += stopped
        if (error := _last_error(failed)) is not None:
            counts["error"] = error
    counts |= _reused_counts(tasks, counts)
    counts["cost"] = _cost(tasks, context.prices)
    counts["func_name"] = tasks[-1].func_name if tasks else ""
    counts |= words_row(session, tasks)
    counts["shape"] = _shape(tasks, session.created_at)
    if session.is_program:
        counts["busy_s"] = round(sum(map(_call_seconds, tasks)), 3)
    return counts


def _reused_counts(tasks: Iterable[Task], counts: Row) -> Row:
    """The sums with the calls that took the results of identical calls. Their whole prompts count
    as cached, and they generated no token."""
    reused = [task.stats for task in tasks if isinstance(task, Completion) and task.stats.is_reused]
    prompt = sum(stats.prompt_tokens for stats in reused)
    return {
        "reused": len(reused),
        "prompt_tokens": counts["prompt_tokens"] + prompt,
        "cached_tokens": counts["cached_tokens"] + prompt,
        "output_tokens": counts["output_tokens"] - sum(stats.output_tokens for stats in reused),
    }


def _cost(tasks: Iterable[Task], prices: PriceTable | None) -> float | None:
    if prices is None:
        return None
    return sum(prices.cost(task.stats) for task in tasks if isinstance(task, Completion))


def _call_seconds(task: Task) -> float:
    """The time of a call from its last input to its end. 0 for a call that has not ended."""
    ready, finished = task.times.ready, task.times.finished
    return 0.0 if ready is None or finished is None else max(0.0, finished - ready)


def was_stopped(task: Task) -> bool:
    """Whether the task, or a task that it needs, was cancelled. This is no failure."""
    return isinstance(task.outputs[0].error, Cancelled)


def _last_error(failed: Sequence[Task]) -> str | None:
    """The message of the last failure, from the call that failed first."""
    own = [task for task in failed if not was_stopped(task)]
    if not own:
        return None
    output = max(own, key=lambda task: task.times.finished or 0.0).outputs[0]
    error = output.origin or output.error
    return None if error is None else shortened(_root(error).message, _MAX_ERROR)


def _root(error: ParrotError) -> ParrotError:
    while isinstance(error.__cause__, ParrotError):
        error = error.__cause__
    return error


def words_row(session: Session, tasks: Sequence[Task]) -> Row:
    """The first words of the session's last prompt, if it has one."""
    words = _words(session, tasks)
    return {"words": words} if words else {}


def _words(session: Session, tasks: Sequence[Task]) -> str:
    """The first words of the last prompt. A client without a session sends its whole conversation,
    so only its last message counts."""
    last = next((task for task in reversed(tasks) if isinstance(task, Completion)), None)
    if last is None:
        return ""
    if session.is_program:
        for piece in reversed(last.fill):
            if not isinstance(piece, TextPiece) or piece.kind is PieceKind.CONSTANT:
                continue
            if words := first_words([piece.text]):
                return words
    return first_words(_texts(last))


def _texts(completion: Completion) -> Iterator[str]:
    """The texts of the prompt after the earlier calls that it continues."""
    for piece in completion.fill:
        yield piece.text if isinstance(piece, TextPiece) else piece.variable.partial_text


def first_words(texts: Iterable[str], max_chars: int = _MAX_WORDS) -> str:
    """The first words, with one space between two of them, and an ellipsis if there are more."""
    found = ""
    num_left = _MAX_SCANNED
    for text in texts:
        found += text[:num_left]
        num_left -= len(text)
        if num_left <= 0 or len(found.lstrip()) > _MAX_WORDS * 2:
            break
    return shortened(" ".join(found.split()), max_chars)


def shortened(text: str, max_chars: int) -> str:
    """The text, or its start and an ellipsis."""
    return text if len(text) <= max_chars else text[: max_chars - 1].rstrip() + "…"


def _shape(tasks: Sequence[Task], began: float) -> list[list[Any]]:
    """The bars of the run's timeline: `[lane, from, to, state]`, with times in hundredths of the
    run. If there are too many calls, a bar stands for several that follow each other."""
    shown = [task for task in tasks[-_MAX_CALLS:] if _started(task) is not None]
    shown.sort(key=lambda task: _started(task) or 0.0)
    if not shown:
        return []
    latest = max(max(_started(task) or 0.0, task.times.finished or 0.0) for task in shown)
    is_over = all(task.is_finished for task in shown)
    length = max((latest - began) / (1.0 if is_over else 1.0 - _RUNNING_PART), 1e-9)
    per_bar = -(-len(shown) // _MAX_BARS)
    free_at = [-1.0] * _MAX_LANES  # the end of the last bar in each lane
    bars: list[list[Any]] = []
    for first in range(0, len(shown), per_bar):
        members = shown[first : first + per_bar]
        start, end = _span(members, began + length)
        lane = next((n for n, free in enumerate(free_at) if free <= start), None)
        if lane is None:
            lane = free_at.index(min(free_at))
        free_at[lane] = max(free_at[lane], end)
        from_, to = (round(_SHAPE_UNITS * (at - began) / length) for at in (start, end))
        states = {task.state for task in members}
        state = next((state for state in _SHOWN_STATES if state in states), members[0].state)
        bars.append([lane, max(0, from_), to, state.value])
    return bars


def _started(task: Task) -> float | None:
    """When the task started. No engine starts a reused call: it starts when it is ready."""
    is_reused = isinstance(task, Completion) and task.stats.is_reused
    return task.times.ready if is_reused else task.times.started


def _span(tasks: Sequence[Task], now: float) -> tuple[float, float]:
    """From the first start to the last end, or to now."""
    start = min(_started(task) or 0.0 for task in tasks)
    ends = [now if task.times.finished is None else task.times.finished for task in tasks]
    return start, max(ends)


def last_tasks(session: Session) -> list[Task]:
    """The tasks that are shown, in the order of their submission."""
    calls = reversed(session.graph.calls.values())
    tasks = chain.from_iterable(reversed(call.tasks) for call in calls)
    return list(islice(tasks, _MAX_CALLS))[::-1]
