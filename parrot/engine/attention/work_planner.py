"""Plans that are kept while the same contexts decode."""

from collections.abc import Sequence

import numpy as np

from parrot.engine.attention.context_tree import GateConfig, IntArray
from parrot.engine.attention.work_list import SplitConfig, StepRows, WorkList, plan_work
from parrot.engine.kernels.attention_shape import AttentionShape

_MAX_GROWTH = 64
"""Tokens that contexts may grow before a plan is made again, to keep the splits even."""


class WorkPlanner:
    """Plans steps, and returns the previous plan while the same contexts only decode.

    A plan stays right as its contexts grow, since the device reads their positions.
    `num_shared_steps` and `num_shared_tokens` count, to notice sharing that is off."""

    def __init__(self, shape: AttentionShape, gate: GateConfig | None, split: SplitConfig) -> None:
        self._arguments = (shape, gate, split)
        self._context_ids: tuple[int, ...] = ()
        self._starts: IntArray = np.zeros(0, dtype=np.int32)
        self.last: WorkList | None = None
        self.num_shared_steps = 0
        self.num_shared_tokens = 0

    def plan(
        self, context_ids: Sequence[int], step: StepRows, table_rows: IntArray | None = None
    ) -> WorkList:
        """The step's work list; the same object as last time means that nothing has to be sent.

        Its items name the rows of the step's tables, or `table_rows[i]` in the place of row i.

        `context_ids` names the rows of `step`. While a context is in consecutive steps, the pages
        that it has filled stay where they are in its row of the table."""
        key = tuple(context_ids)
        work = self.last
        if work is None or key != self._context_ids or not self._still_holds(work, step):
            work = plan_work(step, *self._arguments)
            self.last = work = work if table_rows is None else work.with_table_rows(table_rows)
            self._context_ids, self._starts = key, step.starts.copy()
        self.num_shared_steps += work.num_shared_tokens > 0
        self.num_shared_tokens += work.num_shared_tokens
        return work

    def _still_holds(self, work: WorkList, step: StepRows) -> bool:
        """Whether the same contexts only decode, then and now, not far from each other."""
        if step.q_lens.max(initial=0) != 1 or len(step.q_lens) != len(work.token_order):
            return False
        growth = step.starts - self._starts
        return bool((growth >= 0).all() and (growth < _MAX_GROWTH).all())
