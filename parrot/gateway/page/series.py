"""The last ten minutes of the service, in steps of ten seconds. They are taken from the counters of
`/metrics`, so that a call costs no more while they are recorded."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from parrot.gateway.page.feed import Rows
from parrot.gateway.page.visitors import Visitor
from parrot.serve.core import ServeCore
from parrot.serve.execution.fleet import EngineView
from parrot.serve.metrics import NO_TOTALS, EngineTotals
from parrot.utils.metrics import FIRST_TOKEN_S

STEP_S = 10.0
_MAX_STEPS = 60
_MAX_ENGINES = 32  # Engines of one step. The others are only in the sums.


class SeriesStep(NamedTuple):
    """The work of the service in one step. None: not known."""

    number: int
    at: float  # its end, as Unix time
    tokens_s: float  # generated tokens per second, of calls that ended in the step
    running: int  # calls at the end of the step
    queued: int
    cached: float | None  # the cached share of prompts
    kv: float | None  # the used share of the engines' KV blocks
    first_token_s: float | None  # the median time to the first token
    engines: Mapping[str, Mapping[str, float | None]]  # tokens per second and milliseconds per step


class RecentSeries:
    """Records a step every ten seconds, and keeps the last 60."""

    def __init__(self, core: ServeCore, epoch: float) -> None:
        """`epoch`: the clock's zero as Unix time."""
        self._core = core
        self._epoch = epoch
        self._steps: deque[SeriesStep] = deque(maxlen=_MAX_STEPS)
        self._number = 0
        self._before: Mapping[str, EngineTotals] = {}

    async def run(self) -> None:
        self._before = self._core.engine_totals()
        while True:
            await self._core.clock.sleep(STEP_S)
            self.record()

    def record(self) -> None:
        """Record the step that ends now."""
        core, before = self._core, self._before
        self._before = after = core.engine_totals()
        made = {name: totals.since(before.get(name, NO_TOTALS)) for name, totals in after.items()}
        prompt, cached, generation = (
            sum(getattr(totals, name) for totals in made.values())
            for name in ("prompt", "cached", "generation")
        )
        engines = core.fleet.views()
        self._number += 1
        self._steps.append(
            SeriesStep(
                self._number,
                round(self._epoch + core.clock.now(), 3),
                round(generation / STEP_S, 2),
                sum(engine.num_running for engine in engines),
                core.num_queued,
                round(cached / prompt, 3) if prompt else None,
                _kv_share(engines),
                _median([totals.first_tokens for totals in made.values()]),
                {
                    engine.info.engine_name: _engine_step(engine, made)
                    for engine in engines[:_MAX_ENGINES]
                },
            )
        )

    def rows(self, visitor: Visitor) -> Rows:
        """One row for each step. The load of the service is the operator's: tenants see no rows."""
        if visitor.tenant is not None:
            return {}
        steps = (step._asdict() for step in self._steps)
        return {f"step:{step.pop('number')}": step for step in steps}


def _engine_step(
    engine: EngineView, made: Mapping[str, EngineTotals]
) -> Mapping[str, float | None]:
    runtime, totals = engine.runtime, made.get(engine.info.engine_name, NO_TOTALS)
    step_ms = None if runtime is None else round(runtime.recent_average_latency / 1e6, 3)
    return {"tokens_s": round(totals.generation / STEP_S, 2), "step_ms": step_ms}


def _kv_share(engines: Sequence[EngineView]) -> float | None:
    known = [e.runtime for e in engines if e.runtime is not None and e.runtime.num_max_blocks]
    blocks = sum(runtime.num_max_blocks for runtime in known)
    free = sum(runtime.num_free_blocks for runtime in known)
    return round(1 - free / blocks, 3) if blocks else None


def _median(histograms: Sequence[Sequence[int]]) -> float | None:
    """The median of the observations, within its bucket by interpolation."""
    counts: list[int] = [sum(column) for column in zip(*histograms, strict=True)]
    half, passed = sum(counts) / 2, 0
    if not half:
        return None
    lower: float = 0.0
    for upper, count in zip(FIRST_TOKEN_S, counts, strict=False):
        if passed + count >= half:
            part = (half - passed) / count
            return round(lower + (upper - lower) * part, 4)
        passed += count
        lower = upper
    return lower
