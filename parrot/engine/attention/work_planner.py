"""Plans that are kept while the same contexts decode."""

from collections.abc import Sequence

from parrot.engine.attention.context_tree import GateConfig, IntArray
from parrot.engine.attention.work_list import SplitConfig, StepRows, WorkList, plan_work
from parrot.engine.kernels.attention_shape import AttentionShape

_MAX_GROWTH = 64
"""Tokens that contexts may grow before a plan is made again, to keep the splits even."""

_KEPT = 8
"""Plans that are kept: steps with drafts and without take turns."""

_Key = tuple[tuple[int, ...], bytes]


class WorkPlanner:
    """Plans steps, and returns an earlier plan while the same contexts have as many new tokens.

    A plan stays right as its contexts grow, since the device reads their positions.
    `num_shared_steps` and `num_shared_tokens` count, to notice sharing that is off."""

    def __init__(self, shape: AttentionShape, gate: GateConfig | None, split: SplitConfig) -> None:
        self._arguments = (shape, gate, split)
        self._kept: dict[_Key, tuple[IntArray, WorkList]] = {}  # with its contexts' lengths
        self.last: WorkList | None = None
        self.num_shared_steps = 0
        self.num_shared_tokens = 0

    def plan(
        self, context_ids: Sequence[int], step: StepRows, table_rows: IntArray | None = None
    ) -> WorkList:
        """The step's work list; the same object as earlier means that, where that was sent, nothing
        has to be.

        Its items name the rows of the step's tables, or `table_rows[i]` in the place of row i.

        `context_ids` names the rows of `step`. While a context has its name, the pages that it has
        filled stay where they are in its row of the table, and that in its place."""
        key = (tuple(context_ids), step.q_lens.tobytes())
        starts, work = self._kept.pop(key, (step.starts, None))
        if work is None or not _still_holds(work, step.starts - starts):
            work = plan_work(step, *self._arguments)
            work, starts = (
                work if table_rows is None else work.with_table_rows(table_rows),
                step.starts,
            )
        self._kept[key] = starts, work
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        self.last = work
        self.num_shared_steps += work.num_shared_tokens > 0
        self.num_shared_tokens += work.num_shared_tokens
        return work


def _still_holds(work: WorkList, growth: IntArray) -> bool:
    """Whether a plan is right, and its splits even, for contexts that have grown so much."""
    if work.hides_keys or work.dense or len(work.converted_pages):
        return False
    return bool((growth >= 0).all() and (growth < _MAX_GROWTH).all())
