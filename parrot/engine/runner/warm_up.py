"""Synthetic plans, to compile kernels and capture graphs before the first request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from parrot.engine.attention.context_tree import GateConfig
from parrot.engine.attention.tree_attention import config_for
from parrot.engine.attention.work_list import SplitConfig, StepRows, WorkList, plan_work
from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.runner.graphs import StepSize

_CONTEXTS = (64, 2048)
# Products of few rows have kernels by the next power of two, and others for multiples of 16; small
# ones have theirs for one row and for two.
_PROMPTS = (1, 2, 8, 16, 24, 32, 40, 64, 256)


@dataclass(frozen=True, slots=True)
class SyntheticPlans:
    """Plans of all kinds of steps. Their contexts are the same block again and again."""

    shape: AttentionShape
    gate: GateConfig | None
    split: SplitConfig
    max_tokens: int
    max_seq_len: int

    def for_kernels(self) -> list[WorkList]:
        """Steps without a graph that together launch every kernel: prompts; and decodes, alone and
        beside a prompt, few of them, and enough for even ones to take the lighter tiles."""
        short = min(_CONTEXTS[0], self.max_seq_len)
        plans = [self._plan([n], n) for n in (*_PROMPTS, *self.dense_lengths()[:1])]
        for q_lens in ([1], [1, short]):
            few = self._plan(q_lens, short)
            enough = config_for(self.shape).deep_resident // self.shape.num_kv_heads + 1
            plans += [few, replace(few, narrow=np.repeat(few.narrow, enough, axis=0))]
        return plans

    def for_graphs(self, size: StepSize) -> list[WorkList]:
        """A prompt, with pages to convert and without; or decodes with short contexts, long ones,
        and a shared prefix."""
        rows = size.rows
        if size.logits is not None:
            length = min(rows, self.max_seq_len)
            work = self._plan([length] * (rows // length), length)
            work = work.with_table_rows(np.zeros(rows, dtype=np.int32))  # any row will do
            none = work.converted_fills[:0]
            return [work, replace(work, converted_fills=none, converted_pages=none[:, 0])]
        lengths = [min(n, self.max_seq_len - 1) for n in _CONTEXTS]
        plans = [self._plan([1] * rows, n) for n in lengths]
        if self.gate is not None and rows > 1:
            plans.append(self._plan([1] * rows, lengths[-1], self.gate))
        # Most real ones are uneven, and have other tiles in some sizes.
        return plans + [replace(plan, narrow_is_even=False) for plan in plans]

    def dense_lengths(self) -> range:
        """Lengths of the beginnings of prompts that one step may leave to the library."""
        if self.split.dense is None:
            return range(0)
        return range(self.split.dense_min, self.max_tokens + 1, self.split.dense)

    def _plan(self, q_lens: Sequence[int], length: int, gate: GateConfig | None = None) -> WorkList:
        """Contexts of `length` tokens, of which the last `q_lens` are computed."""
        num_blocks = -(-length // self.shape.page_size)
        tables = np.zeros((len(q_lens), num_blocks + 1), dtype=np.int32)
        counts = np.array(q_lens, dtype=np.int32)
        return plan_work(StepRows(tables, length - counts, counts), self.shape, gate, self.split)
