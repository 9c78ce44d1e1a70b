"""What became of the places of engines that several ServeCores share, by a history."""

from collections.abc import Callable, Iterator

from benchmark.nemesis.history import History

STARVES_S = 20.0
"""In which any program ends when nothing disturbs it, but for one that starves."""


def broken(history: History, disturbed_s: Callable[[float, float], float]) -> Iterator[str]:
    """`disturbed_s`: of a time from when to when, seconds in which anything may be slow."""
    yield from _exceeded(history)
    yield from _starved(history, disturbed_s)


def _exceeded(history: History) -> Iterator[str]:
    """Engines that ran more calls at once than they may."""
    for peak in history.peaks:
        if peak.calls > peak.capacity:
            yield f"{peak.engine} ran {peak.calls} calls at once, and may run {peak.capacity}"


def _starved(history: History, disturbed_s: Callable[[float, float], float]) -> Iterator[str]:
    """Programs that others did not let come to their end, where engines are shared."""
    if not history.peaks:
        return
    for life in history.lives:
        if life.ended is None:
            continue  # which is told already
        took_s = life.ended - life.began
        waited_s = took_s - disturbed_s(life.began, life.ended)
        if waited_s > STARVES_S:
            program = f"program {life.program} ({life.kind})"
            yield f"{program} took {took_s:.1f} s, and {waited_s:.1f} s of that undisturbed"
