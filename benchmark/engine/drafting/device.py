"""A GPU and its host in virtual time. Steps take the times that an 8B shape was measured to take on
an H200, with and without drafts, so the gain of drafts can be predicted without a GPU."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmark.engine.drafting.texts import Targets
from parrot.engine.core.steps import (
    LaunchedStep,
    RunnerInfo,
    StepPlan,
    StepResult,
)

# Milliseconds, by the number of sequences, of steps that are launched ahead and have no drafts.
PLAIN = ((1, 4.07), (4, 4.24), (16, 5.03), (64, 6.71), (256, 13.4))
# Additional milliseconds of the device for steps with drafts, by their size.
ADDED = ((8, 0.25), (16, 0.4), (32, 0.6), (64, 1.0), (128, 2.0), (192, 2.8), (256, 3.7))
PROMPT_TOKEN_MS = 0.022
# Milliseconds of the host from the end of a step to the launch of the next.
HOST, HOST_SEQUENCE, HOST_DRAFTS, HOST_DRAFT = 0.5, 0.03, 0.6, 0.008
BLOCK, NUM_BLOCKS, MAX_LEN, VOCABULARY = 16, 40_000, 32_768, 1 << 18


class VirtualClock:
    """A clock that advances with the work of the device and the host."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(f"the benchmark must not sleep, but slept for {seconds} s")


@dataclass(frozen=True, slots=True)
class Simulated:
    """A launched step with its start and end times."""

    began: float
    ended: float
    result: StepResult
    clock: VirtualClock

    def wait_until_due(self) -> None:
        self.clock.seconds = max(self.clock.seconds, self.began)

    def wait(self) -> StepResult:
        self.clock.seconds = max(self.clock.seconds, self.ended)
        return self.result


class SimulatedDevice:
    """An `OverlappingRunner` that outputs the target texts."""

    def __init__(self, targets: Targets) -> None:
        self.clock = VirtualClock()
        self.info = RunnerInfo(
            NUM_BLOCKS,
            BLOCK,
            MAX_LEN,
            VOCABULARY,
            0.0,
            0.0,
            draft_sizes=tuple(size for size, _ in ADDED),
        )
        self._targets = targets
        self._free_at = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan, None).wait()

    def launch(self, plan: StepPlan, previous: LaunchedStep | None) -> Simulated:
        num_drafts = sum(s.num_drafts for s in plan.sequences)
        host_ms = HOST + HOST_SEQUENCE * len(plan.sequences)
        if num_drafts:
            host_ms += HOST_DRAFTS + HOST_DRAFT * num_drafts
        self.clock.seconds += 1e-3 * host_ms
        began = max(self.clock.seconds, self._free_at)
        self._free_at = began + 1e-3 * _device_ms(plan, num_drafts)
        return Simulated(began, self._free_at, self._targets.result(plan), self.clock)


def _device_ms(plan: StepPlan, num_drafts: int) -> float:
    num_sequences = len(plan.sequences)
    plain = _between(PLAIN, num_sequences)
    prompt = PROMPT_TOKEN_MS * (plan.num_tokens - num_sequences - num_drafts)
    if not num_drafts:
        return plain + prompt
    sizes = [size for size, _ in ADDED]
    added = ADDED[min(bisect_left(sizes, num_sequences + num_drafts), len(sizes) - 1)][1]
    return plain + prompt + added


def _between(table: Sequence[tuple[int, float]], at: float) -> float:
    """Linear interpolation between two neighbours in the table."""
    for (low, first), (high, last) in pairwise(table):
        if at <= high:
            return first + (last - first) * max(0.0, at - low) / (high - low)
    return table[-1][1]
