"""A journal without a disk, and the state that it must restore."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from parrot.journal.log import ENDED, Record
from parrot.protocol.errors import ParrotError
from parrot.protocol.sampling import Logprobs
from parrot.serve.core import ServeCore
from parrot.serve.graph.nodes import Completion, SemanticVariable
from parrot.serve.sessions import Session


class MemoryFile:
    """A journal storage in a list."""

    errors: type[Exception] = OSError

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self.records = list(records)
        self.epoch = 1

    def is_owned(self) -> bool:
        return True

    def fact(self, name: str, value: int) -> int:
        return 7  # as if this value had been stored first

    def read(self) -> Iterator[Record]:
        ended = {record.subject for record in self.records if record.kind == ENDED}
        return iter([record for record in self.records if record.subject not in ended])

    def last_seq(self) -> int:
        return self.records[-1].seq if self.records else 0

    def write(self, records: Sequence[Record]) -> None:
        self.records += records

    is_short = False

    def use_reserve(self, error: Exception) -> bool:
        return False

    def refill(self) -> bool:
        return True

    def describe(self, error: Exception) -> str:
        return str(error)

    def note_ends(self, records: Sequence[Record]) -> None: ...

    @property
    def has_ended(self) -> bool:
        return False

    def trim(self) -> None: ...

    def close(self) -> None: ...


def state_of(core: ServeCore) -> dict[int, Any]:
    """Return all state that programs can see, except readers and running work."""
    return {session.id: _session(session) for session in core.sessions}


def asked_calls(core: ServeCore) -> dict[int, set[int]]:
    """Return the tasks of each session that have a reader, directly or through other tasks."""
    return {
        session.id: {
            task.id
            for call in session.graph.calls.values()
            for task in call.tasks
            if task.reader_demand
        }
        for session in core.sessions
    }


def _session(session: Session) -> dict[str, Any]:
    graph = session.graph
    tasks = [task for call in graph.calls.values() for task in call.tasks]
    used = Counter(session.account.used)
    # Restored log probabilities have their own token table instead of the tokenizer's.
    used["text_bytes"] -= sum(
        task.stats.logprobs.num_bytes
        for task in tasks
        if isinstance(task, Completion) and task.is_finished and task.stats.logprobs is not None
    )
    return {
        "facts": (session.auth, session.tenant, session.apps, session.was_read),
        "on_demand": graph._on_demand,
        "used": {name: n for name, n in used.items() if n},
        "variables": {v.id: _variable(v) for v in graph.variables.values()},
        "calls": {
            request_id: [_task(task) for task in call.tasks]
            for request_id, call in graph.calls.items()
        },
        "answers": {} if graph._responses is None else dict(graph._responses._answers),
        "held": {
            task.id
            for task in tasks
            if isinstance(task, Completion) and task.allows_background and not task.is_finished
        },
    }


def _variable(variable: SemanticVariable) -> tuple[Any, ...]:
    text = variable.partial_text if variable.error is None and variable.is_settled else None
    return variable.name, variable.state, text, variable.tokenized, _error(variable.error)


def _error(error: BaseException | None) -> Any:
    if not isinstance(error, ParrotError):
        return None
    return error.type, error.message, error.param, _error(error.__cause__)


def _task(task: Any) -> tuple[Any, ...]:
    state = task.state if task.is_finished else None
    names = (task.id, task.func_name, state, [v.id for v in task.inputs])
    if isinstance(task, Completion):
        texts = [getattr(piece, "text", None) for piece in task.fill]
        before = None if task.previous is None else task.previous.id
        stats = replace(task.stats, logprobs=None) if task.is_finished else None
        scores = _scores(task.stats.logprobs) if task.is_finished else None
        return (*names, texts, task.sampling, task.options, before, stats, scores)
    results = [(name, variable.id) for name, variable in task.results]
    return (*names, task.source, task.timeout_s, results)


def _scores(logprobs: Logprobs | None) -> list[tuple[bytes, float]]:
    """Return the bytes and log probability of each token, independent of the token table."""
    if logprobs is None:
        return []
    assert logprobs.tokens is not None
    tokens = [logprobs.tokens[number] for number in logprobs.ids]
    return list(zip(tokens, logprobs.values, strict=True))
