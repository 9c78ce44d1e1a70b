"""How many threads a step on a CPU is divided among.

Threads of a step wait for each other hundreds of times, so one whose core has other work to do
makes all of them wait: with a busy neighbour two threads decode a fourth as fast as one. Nobody
says what else runs on a machine, so the times of steps have to.

    steps  2 2 2 2 2 2 [1 1 1] 1 1 1 1 1 ...     the probe was faster: it is kept
           1 1 1 1 1 1 [2] 1 1 1 1 1 1 1 ...     it was far slower: it ends at once
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean

import torch

# Steps of up to so many rows are compared with each other. Within a kind, a step takes about as
# long as its rows and so many more.
_KINDS = (8, 64)
_BASE_ROWS = 24.0

_SMOOTHING = 0.25
# Other numbers are taken if steps take at most so much of the time, and left again if it was more
# than so much after all. In doubt fewer are better: others can use the cores, and do not disturb.
_WORTH_MORE, _WORTH_FEWER = 0.92, 1.0
_KEEP_MORE, _KEEP_FEWER = 1.0, 1.15
_HOPELESS = 1.5  # a probe that is so much slower ends at once
_CHANGED = 1.5  # so much slower than before: something else runs now
_PROBE_STEPS = 3
_LEAST_S = 1e-6  # clocks may say that a step took no time
_FIRST_PAUSE, _SHORTEST_PAUSE, _LONGEST_PAUSE = 2, 16, 2000
_PAUSE_PER_LOSS = 80  # steps after a probe that took a step's time more than usual
_TRIAL_STEPS, _FIRST_VERDICT = 16, 4


@dataclass(slots=True)
class _Kind:
    """The measurements of one kind of steps. Costs are seconds per row.

    `usual`: of a step with the number in use, lately; `settled`: at the last failed probe. `turn`:
    which other number is next. `fallback`: the number before the last change and its cost, until
    the new one has proved itself."""

    threads: int
    usual: float | None = None
    settled: float | None = None
    until_probe: int = _FIRST_PAUSE
    tried: set[int] = field(default_factory=set)
    turn: int = 0
    probed: int | None = None
    probe: list[float] = field(default_factory=list)
    fallback: tuple[int, float] | None = None
    trial: int = 0


class ThreadPolicy:
    """Chooses a number of threads for each step from how long steps took.

    From time to time a few steps are run with one thread less or more, or half or twice as many; if
    those were faster, that number is kept, and left again should it turn out worse. The more time a
    probe lost, the later is the next one; if steps become slower, fewer are tried at once."""

    def __init__(self, most: int) -> None:
        """`most`: threads, at least one. It is the number that the first steps have."""
        self._most = most
        self._kinds = [_Kind(most) for _ in range(len(_KINDS) + 1)]

    def choose(self, num_rows: int) -> int:
        """Threads for the next step, which computes so many rows."""
        kind = self._kind(num_rows)
        return kind.threads if kind.probed is None else kind.probed

    def observe(self, num_rows: int, seconds: float) -> None:
        """Take in how long a step took that had the number which `choose` gave."""
        kind, threads = self._kind(num_rows), self.choose(num_rows)
        if threads not in kind.tried:
            kind.tried.add(threads)  # torch prepared things that it keeps
            return
        cost = max(seconds, _LEAST_S) / (num_rows + _BASE_ROWS)
        if kind.probed is None:
            self._count(kind, cost)
        else:
            self._judge(kind, kind.probed, cost)

    def _kind(self, num_rows: int) -> _Kind:
        return self._kinds[sum(num_rows > most for most in _KINDS)]

    def _count(self, kind: _Kind, cost: float) -> None:
        """A step with the number in use; a probe may be due after it."""
        usual = cost if kind.usual is None else kind.usual
        kind.usual = usual + _SMOOTHING * (cost - usual)
        if kind.fallback is not None:
            kind.trial += 1
            threads, before = kind.fallback
            limit = before * (_KEEP_FEWER if kind.threads < threads else _KEEP_MORE)
            if kind.trial >= _FIRST_VERDICT and kind.usual > limit:
                lost = kind.trial * (kind.usual / before - 1)
                kind.threads, kind.usual, kind.fallback = threads, before, None
                self._rest(kind, lost)
                return
            if kind.trial == _TRIAL_STEPS:
                kind.fallback = None
        kind.until_probe -= 1
        has_slowed = kind.settled is not None and kind.usual > _CHANGED * kind.settled
        if has_slowed and kind.threads > 1:
            kind.turn = kind.until_probe = 0  # the next probe is of fewer
        if kind.until_probe <= 0 and self._most > 1:
            kind.probed = self._next(kind)

    def _next(self, kind: _Kind) -> int:
        now = kind.threads
        others = [n for n in (now - 1, now // 2, now + 1, 2 * now) if 1 <= n <= self._most]
        return others[kind.turn % len(others)]

    def _judge(self, kind: _Kind, threads: int, cost: float) -> None:
        """A step of a probe."""
        assert kind.usual is not None, kind
        kind.probe.append(cost)
        if cost <= _HOPELESS * kind.usual and len(kind.probe) < _PROBE_STEPS:
            return
        costs, mean = kind.probe, fmean(kind.probe)
        kind.probed, kind.probe = None, []
        if mean <= (_WORTH_FEWER if threads < kind.threads else _WORTH_MORE) * kind.usual:
            kind.fallback, kind.trial = (kind.threads, kind.usual), 0
            kind.threads, kind.usual = threads, mean
            kind.settled, kind.until_probe = None, _FIRST_PAUSE
        else:
            self._rest(kind, (sum(costs) / kind.usual) - len(costs))

    def _rest(self, kind: _Kind, lost: float) -> None:
        """A probe failed; it took the time of so many steps more than usual."""
        kind.turn += 1
        kind.settled = kind.usual
        pause = min(_PAUSE_PER_LOSS * lost, _LONGEST_PAUSE)
        kind.until_probe = max(_SHORTEST_PAUSE, int(pause))


class StepThreads:
    """Sets torch's threads for each step, as a `ThreadPolicy` says, and times it."""

    def __init__(self, most: int) -> None:
        self._policy = ThreadPolicy(most)

    @contextmanager
    def step(self, num_rows: int) -> Iterator[None]:
        """The step, which computes so many rows, is run inside."""
        threads = self._policy.choose(num_rows)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        began = time.perf_counter()
        yield
        self._policy.observe(num_rows, time.perf_counter() - began)
