"""Run a trace, and shorten a failing trace."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tests.fuzz.checking import Checker
from tests.fuzz.play import Counts, Play
from tests.fuzz.traces import Ask, Op, Setup, Trace

_DISTURBING = frozenset({"cancel", "free", "leave", "fault", "reset"})
_TRIES = 400  # Maximum number of runs to shorten one trace.


@dataclass
class TraceResult:
    """The result of a trace. `failure` is a traceback, or None. See `Checker` for `slowness`."""

    failure: str | None = None
    counts: Counts = field(default_factory=Counts)
    slowness: dict[int, float] = field(default_factory=dict)
    num_compared: int = 0
    num_rounded: int = 0


def try_trace(trace: Trace) -> TraceResult:
    tried = TraceResult()
    try:
        play = Play(trace)
        play.run()
        checker = Checker(trace.setup, play.expected)
        checker.check()
        for following in play.followings:
            checker.check_following(following)
    except Exception:  # noqa: BLE001 - any exception is a finding
        tried.failure = traceback.format_exc()
        return tried
    tried.counts = play.counts()
    tried.slowness = checker.slowness
    tried.num_compared, tried.num_rounded = checker.num_compared, checker.num_rounded
    return tried


def undisturbed(trace: Trace) -> Trace:
    """Return the requests of the trace without cancellations, frees and faults."""
    ops = [op for op in trace.ops if isinstance(op, Ask) or op.kind not in _DISTURBING]
    return trace.with_ops(tuple(ops))


def shrink(trace: Trace, fails: Callable[[Trace], bool]) -> Trace:
    """Remove operations, then pieces and options of requests, then features of the engine, as long
    as the trace fails."""
    left = _TRIES

    def still(candidate: Trace) -> bool:
        nonlocal left
        left -= 1
        return left > 0 and candidate != trace and fails(candidate)

    before = None
    while before != trace and left > 0:
        before = trace
        trace = _drop_ops(trace, still)
        for index in range(len(trace.ops)):
            for simpler in _simpler(trace.ops[index]):
                ops = (*trace.ops[:index], simpler, *trace.ops[index + 1 :])
                if still(candidate := trace.with_ops(ops)):
                    trace = candidate
                    break
        for name, value in _PLAIN.items():
            candidate = replace(trace, setup=replace(trace.setup, **{name: value}))
            if still(candidate):
                trace = candidate
    return trace


_PLAIN = {
    name: getattr(Setup(), name)
    for name in (
        "launches", "reports_late", "num_host_blocks", "max_draft", "poison", "chunk",
        "max_total", "mixed_fill", "policy", "max_batch", "max_batched", "shares_prefix",
        "max_seq_len", "seed",
    )
}  # fmt: skip


def _drop_ops(trace: Trace, fails: Callable[[Trace], bool]) -> Trace:
    size = max(1, len(trace.ops) // 2)
    while size:
        at = 0
        while at < len(trace.ops):
            candidate = trace.with_ops(trace.ops[:at] + trace.ops[at + size :])
            if fails(candidate):
                trace = candidate
            else:
                at += size
        size //= 2
    return trace


def _simpler(op: Op) -> Sequence[Op]:
    if isinstance(op, Ask):
        return [*_plainer(op), *_with_other_sampling(op), *_with_fewer_tokens(op)]
    found: list[Op] = []
    if op.kind == "steps" and op.number > 1:
        found += [replace(op, number=1), replace(op, number=op.number // 2)]
    if len(op.contexts) > 1:
        found += [replace(op, contexts=(context,)) for context in op.contexts]
    return found


def _plainer(ask: Ask) -> list[Op]:
    return [
        replace(ask, stream=False),
        replace(ask, echoes=False),
        replace(ask, drafts=()),
        replace(ask, priority=0),
    ]


def _with_other_sampling(ask: Ask) -> list[Op]:
    if ask.sampling is None:
        return []
    plain = {"max_gen_length": ask.sampling["max_gen_length"], "temperature": 0.0}
    samplings = [None, plain]
    for key in ask.sampling.keys() - plain.keys():
        samplings.append({k: v for k, v in ask.sampling.items() if k != key})
    for length in (1, ask.sampling["max_gen_length"] // 2):
        if length:
            samplings.append(ask.sampling | {"max_gen_length": length})
    return [replace(ask, sampling=sampling) for sampling in samplings]


def _with_fewer_tokens(ask: Ask) -> list[Op]:
    found: list[Op] = []
    for i, piece in enumerate(ask.pieces):
        before, after = ask.pieces[:i], ask.pieces[i + 1 :]
        if before or after:
            found.append(replace(ask, pieces=before + after))
        for count in {1, len(piece.tokens) // 2}:
            if 0 < count < len(piece.tokens):
                shorter = replace(piece, tokens=piece.tokens[:count])
                found.append(replace(ask, pieces=(*before, shorter, *after)))
    return found
