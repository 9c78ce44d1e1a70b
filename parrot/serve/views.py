"""Views of sessions for their programs, and of engines for all clients."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal, TypeVar

from parrot.protocol.public import (
    CompletionInfo,
    EngineStatus,
    FunctionCosts,
    GraphEdge,
    SessionCounts,
    SessionInfo,
    SessionSummary,
    VarInfo,
)
from parrot.serve.command_log import CommandLog
from parrot.serve.execution.fleet import EngineView
from parrot.serve.graph.nodes import (
    Completion,
    CompletionState,
    RunStats,
    SemanticVariable,
    Task,
    Timeline,
)
from parrot.serve.metrics import Measured, PriceTable
from parrot.serve.sessions import Session
from parrot.utils.tasks import Steps, at_once, in_turns

_NO_RUN = RunStats()
_STEP = 1024  # Rows of a view that are built in one step, before other tasks may run.
A = TypeVar("A")
B = TypeVar("B")


def session_steps(
    session: Session, now: float, expires_in_s: float, prices: PriceTable | None = None
) -> Steps[SessionInfo]:
    """Build the session's view in steps. It contains the calls and variables that exist at the
    start, each in its state when its step runs."""
    tasks = [task for call in session.graph.calls.values() for task in call.tasks]
    variables = yield from _variables(session)
    edges: list[GraphEdge] = []
    for start in range(0, len(tasks), _STEP):
        edges.extend(chain.from_iterable(map(_edges, tasks[start : start + _STEP])))
        yield
    calls = yield from _rows(tasks, lambda task: task_view(task, session.created_at))
    costs = yield from _function_costs(tasks, prices)
    return SessionInfo.model_construct(  # validating all rows would block the event loop
        session_id=session.id,
        state="active",
        apps=list(session.apps),
        age_s=now - session.created_at,
        expires_in_s=expires_in_s,
        vars=variables,
        calls=calls,
        edges=edges,
        costs=costs,
    )


def session_view(steps: Steps[SessionInfo]) -> SessionInfo:
    """Run all steps of `session_steps` at once."""
    return at_once(steps)


def _function_costs(tasks: Iterable[Task], prices: PriceTable | None) -> Steps[list[FunctionCosts]]:
    """The work of engines for finished completions, by function."""
    costs: dict[str, FunctionCosts] = {}
    for number, task in enumerate(tasks, start=1):
        if number % _STEP == 0:
            yield
        if not isinstance(task, Completion) or not task.is_finished:
            continue
        if (call := Measured.of(task, prices)) is None:
            continue
        costs.setdefault(
            task.func_name,
            FunctionCosts(
                func_name=task.func_name,
                calls=0,
                cost=0.0,
                prompt_tokens=0,
                cached_tokens=0,
                output_tokens=0,
            ),
        )
        own = costs[task.func_name]
        own.calls += 1
        own.cost += call.cost
        own.prompt_tokens += call.num_prompt
        own.cached_tokens += call.num_cached
        own.output_tokens += call.num_output
        own.drafted_tokens += call.num_drafted
        own.accepted_tokens += call.num_accepted
    return list(costs.values())


def session_counts(session: Session) -> SessionCounts:
    return SessionCounts(**count_fields(session))


def count_fields(session: Session) -> dict[str, Any]:
    """All fields of `SessionCounts`, as JSON values."""
    tasks = [task for call in session.graph.calls.values() for task in call.tasks]
    states = Counter(task.state for task in tasks)
    stats = [task.stats for task in tasks if isinstance(task, Completion)]
    left = {task.request_id for task in tasks if task.options.remark}
    return {
        "turns": len(session.graph.calls),
        "calls": len(tasks),
        "done": states[CompletionState.DONE],
        "failed": states[CompletionState.FAILED],
        "cancelled": states[CompletionState.CANCELLED],
        "running": states[CompletionState.QUEUED] + states[CompletionState.RUNNING],
        "models": sorted({s.model for s in stats if s.model is not None}),
        "prompt_tokens": sum(s.cached_tokens + s.computed_tokens for s in stats),
        "cached_tokens": sum(s.cached_tokens for s in stats),
        "output_tokens": sum(s.output_tokens for s in stats),
        "prefix_breaks": len(left),
    }


def session_summary(session: Session, now: float, expires_in_s: float) -> SessionSummary:
    counts = session_counts(session)
    prompt = counts.prompt_tokens
    return SessionSummary(
        **dict(counts),
        session_id=session.id,
        kind="conversation" if session.is_program else "program",
        apps=list(session.apps),
        age_s=now - session.created_at,
        expires_in_s=expires_in_s,
        cached_share=counts.cached_tokens / prompt if prompt else None,
    )


def engine_view(engine: EngineView) -> EngineStatus:
    info = engine.info
    return EngineStatus(
        engine_id=engine.id,
        engine_name=info.engine_name,
        engine_type=info.engine_type,
        model=info.model,
        host=info.host,
        port=info.port,
        num_running=engine.num_running,
        tasks_capacity=info.tasks_capacity,
        needed_tokens=engine.needed_tokens,
        num_queued=engine.num_queued,
        used_tokens=engine.num_tokens,
        tokens_capacity=info.tokens_capacity,
        hit_tokens=engine.kv.hit,
        recomputed_tokens=engine.kv.recomputed.total(),
        evicted_tokens=engine.kv.evicted,
        default_sampling=info.default_sampling,
    )


def journal_state(journal: CommandLog | None) -> Literal["ok", "reserve", "full"] | None:
    """The field `journal` of `/ready`."""
    if journal is None:
        return None
    if journal.trouble:
        return "full"
    return "reserve" if journal.shortage else "ok"


async def variables_view(session: Session) -> list[VarInfo]:
    return await in_turns(_variables(session))


def _variables(session: Session) -> Steps[list[VarInfo]]:
    return (yield from _rows(list(session.graph.variables.values()), variable_view))


def _rows(items: Sequence[A], view: Callable[[A], B]) -> Steps[list[B]]:
    rows = [view(item) for item in items[:_STEP]]
    for start in range(_STEP, len(items), _STEP):
        yield
        rows += [view(item) for item in items[start : start + _STEP]]
    return rows


def variable_view(variable: SemanticVariable) -> VarInfo:
    return VarInfo(
        var_id=variable.id,
        var_name=variable.name,
        state=variable.state.value,
        producer=None if variable.producer is None else variable.producer.request_id,
        consumers=sorted({consumer.request_id for consumer in variable.consumers}),
        error=None if variable.error is None else variable.error.to_payload()["error"],
    )


def task_view(task: Task, began: float) -> CompletionInfo:
    """A task's row. A native call with several outputs has one row, with its first output."""
    return CompletionInfo(**task_fields(task, began))


def task_fields(task: Task, began: float) -> dict[str, Any]:
    """All fields of a `CompletionInfo`, as JSON values. The web page builds many of them."""
    is_semantic = isinstance(task, Completion)
    stats = task.stats if isinstance(task, Completion) else _NO_RUN
    output = task.outputs[0]
    objective = task.objective
    return dict(
        kind="semantic" if is_semantic else "native",
        request_id=task.request_id,
        func_name=task.func_name,
        remark=task.options.remark or None,
        output=output.name,
        output_var_id=output.id,
        outputs=[other.id for other in task.outputs],
        state=task.state.value,
        criteria=None if objective is None else objective.criteria.value,
        depth=None if objective is None else objective.depth,
        task_group=None if objective is None else objective.task_group,
        engine=stats.engine_name,
        model=stats.model,
        attempts=stats.attempts,
        cached_tokens=stats.cached_tokens,
        computed_tokens=stats.computed_tokens,
        recomputed_tokens=stats.recomputed_tokens,
        output_tokens=stats.output_tokens,
        decode_s=stats.decode_s,
        finish_reason=stats.finish_reason,
        reused=stats.is_reused,
        **_seconds(task.times, began),
    )


def _seconds(times: Timeline, began: float) -> dict[str, float | None]:
    return {
        f"{name}_s": None if (at := getattr(times, name)) is None else at - began
        for name in ("submitted", "activated", "ready", "started", "finished")
    }


def _edges(task: Task) -> Iterator[GraphEdge]:
    """The edges from each producer to this task, one for each variable."""
    target = task.outputs[0].id
    for variable in task.inputs:
        if variable.producer is not None:
            source = variable.producer.outputs[0].id
            yield GraphEdge(source=source, target=target, variable=variable.name)
