"""The other ranks read the same step that rank 0 sent."""

import dataclasses

import numpy as np
import pytest

from parrot.engine.attention.work_list import SplitConfig, WorkList, plan_work
from parrot.engine.core.steps import (
    BlockCopy,
    PoolSpec,
    SampleSpec,
    ScoreSpec,
    SequenceStep,
    StepPlan,
    Transfer,
)
from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.runner.device import StepReads
from parrot.engine.runner.host.copies import RankTransfers
from parrot.engine.runner.inputs import InputBuilder, StepInputs
from parrot.engine.runner.ranks.steps import RankStep, StepReader, StepWriter
from parrot.protocol.sampling import ResolvedSampling
from tests.support.kernel_cases import SHARE_ALL

SIZE = 4
SHAPE = AttentionShape(8, 2, 16, SIZE, 4)
SPLIT = SplitConfig(num_sms=2, min_span=(4, 4, 4))


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and bool((a == b).all())
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b


def sequence(
    context_id: int, start: int, count: int, *, sampled: bool = True, read: object = None
) -> SequenceStep:
    blocks = [0, *range(10 * context_id, 10 * context_id + 8)][: -(-(start + count) // SIZE)]
    config = ResolvedSampling(temperature=0.5, logprobs=2)
    spec = SampleSpec(context_id, config, 7, start + count) if sampled else None
    return SequenceStep(context_id, list(range(count)), start, blocks, spec, read)  # type: ignore[arg-type]


PLANS = [
    StepPlan((), (BlockCopy(1, 2, 3, 7, 8), BlockCopy(4, 5, 1)), ((2, 8), (6, 3))),
    StepPlan((sequence(1, 9, 1), sequence(2, 6, 1, sampled=False), sequence(3, 8, 1))),
    StepPlan((sequence(1, 10, 1), sequence(2, 7, 1, sampled=False), sequence(3, 9, 1))),
    StepPlan((sequence(4, 0, 17), sequence(1, 11, 1)), (BlockCopy(8, 9, 2),)),
    StepPlan(
        (
            sequence(5, 0, 6, sampled=False, read=PoolSpec(5, 1, 6)),
            sequence(6, 4, 5, sampled=False, read=ScoreSpec(6, 2, (1, 2, 3), 2)),
        )
    ),
]


def work_of(inputs: StepInputs) -> WorkList | None:
    return plan_work(inputs.step, SHAPE, SHARE_ALL, SPLIT) if inputs.num_tokens else None


@pytest.mark.parametrize("with_tables", [True, False])
def test_other_ranks_read_the_step_that_rank_0_sent(with_tables: bool) -> None:
    builder, writer = InputBuilder(16, 8, SIZE), StepWriter(with_tables=with_tables)
    reader = StepReader()
    for plan in PLANS:
        inputs = builder.build(plan)
        work = work_of(inputs)
        reads, changes = StepReads.of(plan.sequences), plan.slot_changes
        sent = RankStep(plan.copies, inputs, work, reads, plan is PLANS[1], slot_changes=changes)
        read = reader.step(writer.message(sent))
        assert read.copies == plan.copies
        assert read.slot_changes == changes
        assert read.needs_logits == sent.needs_logits
        assert same(work, read.work)
        for name in ("starts", "q_lens") + (("tables",) if with_tables else ()):
            if len(inputs.rows):
                assert same(getattr(inputs.step, name), getattr(read.inputs.step, name))
        for name in ("token_ids", "positions", "table_rows", "logit_rows", "pending_at"):
            assert same(getattr(inputs, name), getattr(read.inputs, name)), name
        for name in ("changed_at", "changed_to", "rows"):
            assert same(getattr(inputs, name), getattr(read.inputs, name)), name
        asked = [spec is not None for spec in inputs.samples]
        assert [spec is not None for spec in read.inputs.samples] == asked
        assert (read.reads is None) == (sent.reads is None)
        if read.reads is not None and sent.reads is not None:
            places = [(i, s.start, s.end) for i, s in sent.reads.pools]
            assert [(i, s.start, s.end) for i, s in read.reads.pools] == places
            rows = [(i, s.start, len(s.targets), s.num_top) for i, s in sent.reads.scored]
            found = [(i, s.start, len(s.targets), s.num_top) for i, s in read.reads.scored]
            assert found == rows


def test_other_ranks_read_transfers() -> None:
    """Messages have 32-bit integers. Larger ids are sent modulo 2**31."""
    writer, reader = StepWriter(with_tables=False), StepReader()
    far = 3 * 2**31 + 5
    for sent in (
        RankTransfers(),
        RankTransfers(
            (Transfer(4, True, (9, 7, 8), (0, 2, 1)), Transfer(5, False, (6,), (3,), True))
        ),
        RankTransfers((), (1, 2), (4,)),
        RankTransfers((Transfer(far, True, (), ()),), (far,), (far, 1)),
    ):
        read = reader.step(writer.message(RankStep.of(sent)))
        assert (read.work, read.reads, read.copies, read.inputs.num_tokens) == (None, None, (), 0)
        assert read.transfers == RankTransfers(
            tuple(dataclasses.replace(t, transfer_id=t.transfer_id % 2**31) for t in sent.begun),
            tuple(i % 2**31 for i in sent.landed),
            tuple(i % 2**31 for i in sent.awaited),
        )


def test_a_work_list_is_sent_once() -> None:
    """Later steps with the same work list send shorter messages. The other ranks reuse the object
    that they have."""
    builder, writer, reader = InputBuilder(16, 8, SIZE), StepWriter(with_tables=False), StepReader()
    inputs = builder.build(PLANS[1])
    work = work_of(inputs)
    first = writer.message(RankStep((), inputs, work, None, needs_logits=True))
    read = reader.step(first)
    copies = writer.message(RankStep(PLANS[0].copies, builder.build(PLANS[0]), None, None, True))
    assert reader.step(copies).work is None
    again = writer.message(RankStep((), builder.build(PLANS[2]), work, None, True))
    assert len(again) < len(first)
    assert reader.step(again).work is read.work
