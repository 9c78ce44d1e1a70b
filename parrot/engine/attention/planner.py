"""The work list of each step, planned anew only when it must be."""

from collections.abc import Sequence

import numpy as np

from parrot.engine.attention.context_tree import GateConfig, IntArray
from parrot.engine.attention.work_list import SplitConfig, StepRows, WorkList, plan_work
from parrot.engine.kernels.attention_shape import AttentionShape


class WorkPlanner:
    """Plans steps, and returns the previous plan while the same contexts only decode.

    A plan stays right as its contexts grow, since the device reads their positions; after
    `max_growth` tokens it is made again to keep the splits even. `num_plans` and
    `num_shared_steps` count, to notice sharing that is off."""

    def __init__(
        self,
        shape: AttentionShape,
        gate: GateConfig | None,
        split: SplitConfig,
        *,
        max_growth: int = 64,
    ) -> None:
        self._shape = shape
        self._gate = gate
        self._split = split
        self._max_growth = max_growth
        self._context_ids: tuple[int, ...] = ()
        self._starts: IntArray = np.zeros(0, dtype=np.int32)
        self._work: WorkList | None = None
        self.num_plans = 0
        self.num_shared_steps = 0

    @property
    def last(self) -> WorkList | None:
        """The work list of the last step; None before the first."""
        return self._work

    def plan(
        self, context_ids: Sequence[int], step: StepRows, table_rows: IntArray | None = None
    ) -> WorkList:
        """The step's work list; the same object as last time means that nothing has to be sent.

        Its items name the rows of the step's tables, or `table_rows[i]` in the place of row i.

        `context_ids` names the rows of `step`. While a context is in consecutive steps, the pages
        that it has filled stay where they are in its row of the table."""
        key = tuple(context_ids)
        if self._work is None or not self._still_holds(key, step):
            work = plan_work(step, self._shape, self._gate, self._split)
            self._work = work if table_rows is None else work.with_table_rows(table_rows)
            self._context_ids, self._starts = key, step.starts.copy()
            self.num_plans += 1
        self.num_shared_steps += self._work.num_shared_tokens > 0
        return self._work

    def _still_holds(self, key: tuple[int, ...], step: StepRows) -> bool:
        if key != self._context_ids or len(self._starts) != len(step.starts):
            return False
        if step.q_lens.max(initial=0) != 1 or len(step.q_lens) != self._num_tokens():
            return False
        growth = step.starts - self._starts
        return bool((growth >= 0).all() and (growth < self._max_growth).all())

    def _num_tokens(self) -> int:
        return 0 if self._work is None else len(self._work.token_order)
