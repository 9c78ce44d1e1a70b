"""A runner without a model: every step costs time, every token depends on all before it."""

import zlib
from collections.abc import Sequence

from parrot.engine.config import SimInstance
from parrot.engine.plan import RunnerInfo, StepPlan, StepResult
from parrot.engine.sim.tokenizer import VOCAB_SIZE

_LETTERS = b"etaoin shrdlu cmfwyp vbgkqjxz etaoin "


class SimRunner:
    """Samples letters and spaces, chosen by a checksum of the context: the same context gives the
    same text, whatever else is in the batch. It never ends a text by itself."""

    def __init__(self, instance: SimInstance) -> None:
        self._instance = instance
        self._info = RunnerInfo(
            num_blocks=instance.num_kv_cache_blocks,
            block_size=instance.block_size,
            max_seq_len=instance.max_seq_len,
            vocab_size=VOCAB_SIZE,
            model_mem=0.0,
            cache_mem=0.0,
        )

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def run(self, plan: StepPlan) -> StepResult:
        tokens = {
            sample.job_id: next_token(sample.context_ids)
            for sequence in plan.sequences
            if (sample := sequence.sample) is not None
        }
        return StepResult(tokens, {})

    def cost(self, plan: StepPlan) -> float:
        """Seconds the step takes: see `SimInstance`. Generated tokens count as sequences."""
        costs = self._instance
        num_prefill = sum(len(s.token_ids) for s in plan.sequences if len(s.token_ids) > 1)
        return (
            costs.step_s
            + costs.prefill_token_s * num_prefill
            + costs.sequence_s * len(plan.sequences)
            + costs.context_token_s * sum(s.end for s in plan.sequences)
        )


def next_token(context_ids: Sequence[int]) -> int:
    return _LETTERS[zlib.crc32(memoryview(context_ids)) % len(_LETTERS)]  # type: ignore[arg-type]
