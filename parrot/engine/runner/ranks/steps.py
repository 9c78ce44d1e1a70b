"""Encodes and decodes the steps that rank 0 sends to the other ranks.

A message is one int32 array: the lengths of its parts, then the parts. It contains the plan that
rank 0 has made, and no sampling settings, because only rank 0 samples."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, pairwise

import numpy as np

from parrot.engine.attention.context_tree import IntArray
from parrot.engine.attention.work_list import ITEM_FIELDS, StepRows, WorkList
from parrot.engine.core.steps import BlockCopy, PoolSpec, SampleSpec, ScoreSpec, Transfer
from parrot.engine.runner.device import StepReads
from parrot.engine.runner.host.copies import NO_TRANSFERS, RankTransfers
from parrot.engine.runner.inputs import StepInputs
from parrot.protocol.sampling import ResolvedSampling

_NUM_PARTS = 29  # Arrays in a message.
# Transfer ids are sent as their lowest 31 bits. Far fewer transfers are in flight at once.
_ID_MASK = 2**31 - 1
_POOL, _SCORE = 0, 1
_SOME_SAMPLE = SampleSpec(0, ResolvedSampling(), 0, 0)
_NONE: IntArray = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class RankStep:
    """The part of a step that every rank runs."""

    copies: tuple[BlockCopy, ...]
    inputs: StepInputs
    work: WorkList | None  # None for a step without tokens.
    reads: StepReads | None
    needs_logits: bool  # The result of `sampling.needs_logits`.
    transfers: RankTransfers = NO_TRANSFERS  # Applied before the step.
    slot_changes: tuple[tuple[int, int], ...] = ()  # See `StepPlan`.

    @classmethod
    def of(cls, transfers: RankTransfers) -> "RankStep":
        """A message that contains only transfers."""
        return cls((), _inputs(iter([_NONE] * 12)), None, None, False, transfers)


class StepWriter:
    """Encodes steps. A work list equal to the last one is not sent again."""

    def __init__(self, *, with_tables: bool) -> None:
        """`with_tables`: send block tables, because the other ranks keep none."""
        self._with_tables = with_tables
        self._last: WorkList | None = None

    def message(self, step: RankStep) -> IntArray:
        inputs, work = step.inputs, step.work
        is_known = work is None or work is self._last
        self._last = work or self._last
        asked = np.array([spec is not None for spec in inputs.samples], dtype=np.int32)
        head = [work is not None, is_known, step.reads is not None, step.needs_logits]
        parts: list[IntArray] = [
            np.array(head, dtype=np.int32),
            _ints([astuple(copy) for copy in step.copies]),
            _ints(step.slot_changes),
            inputs.rows,
            inputs.step.tables.reshape(-1) if self._with_tables else _NONE,
            inputs.step.starts,
            inputs.step.q_lens,
            inputs.token_ids,
            inputs.positions,
            inputs.table_rows,
            inputs.logit_rows,
            asked,
            inputs.pending_at,
            inputs.changed_at,
            inputs.changed_to,
            _reads(step.reads),
            *_transfer_parts(step.transfers),
            *([_NONE] * 10 if work is None or is_known else _work(work)),
        ]
        assert len(parts) == _NUM_PARTS, len(parts)
        return np.concatenate([_ints([len(part) for part in parts]), *parts], dtype=np.int32)


class StepReader:
    """Decodes all messages of one `StepWriter`, in order."""

    def __init__(self) -> None:
        self._last: WorkList | None = None

    def step(self, message: IntArray) -> RankStep:
        """The step of a message. Its arrays are views of the message."""
        places = accumulate(message[:_NUM_PARTS].tolist(), initial=_NUM_PARTS)
        parts = iter([message[first:end] for first, end in pairwise(places)])
        has_work, is_known, has_reads, needs_logits = next(parts).tolist()
        copies = tuple(BlockCopy(*copy) for copy in next(parts).reshape(-1, 5).tolist())
        changes = tuple((block, slot) for block, slot in next(parts).reshape(-1, 2).tolist())
        inputs = _inputs(parts)
        reads = _read_reads(next(parts), has_any=bool(has_reads))
        begun = _read_transfers(next(parts).tolist())
        transfers = RankTransfers(begun, *(tuple(next(parts).tolist()) for _ in range(2)))
        if not is_known:
            self._last = _read_work(list(parts))
        work = self._last if has_work else None
        return RankStep(copies, inputs, work, reads, bool(needs_logits), transfers, changes)


def _ints(values: Sequence[int] | Sequence[tuple[int, ...]]) -> IntArray:
    return np.array(values, dtype=np.int32).reshape(-1)


def _inputs(parts: Iterator[IntArray]) -> StepInputs:
    """Inputs without sampling settings. `samples` only tells which rows are sampled."""
    rows, tables, starts, q_lens = (next(parts) for _ in range(4))
    token_ids, positions, table_rows, logit_rows = (next(parts) for _ in range(4))
    asked, pending_at, changed_at, changed_to = (next(parts) for _ in range(4))
    return StepInputs(
        versions=(),
        rows=rows,
        step=StepRows(_table(tables, len(starts)), starts, q_lens),
        token_ids=token_ids,
        positions=positions,
        table_rows=table_rows,
        logit_rows=logit_rows,
        samples=tuple(_SOME_SAMPLE if one else None for one in asked.tolist()),
        sampled=(),
        pending_at=pending_at,
        pending=(),
        changed_at=changed_at,
        changed_to=changed_to,
    )


def _table(blocks: IntArray, num_rows: int) -> IntArray:
    return blocks.reshape(num_rows, -1 if num_rows else 0)


def _reads(reads: StepReads | None) -> IntArray:
    """Rows whose hidden states are read. All ranks need them to compute the logits of scores."""
    if reads is None:
        return _NONE
    pools = [(_POOL, first, spec.start, spec.end, 0) for first, spec in reads.pools]
    scored = [(_SCORE, i, s.start, len(s.targets), s.num_top) for i, s in reads.scored]
    return _ints([*pools, *scored])


def _read_reads(rows: IntArray, *, has_any: bool) -> StepReads | None:
    if not has_any:
        return None
    reads = StepReads()
    for kind, first, start, count, num_top in rows.reshape(-1, 5).tolist():
        if kind == _POOL:
            reads.pools.append((first, PoolSpec(0, start, count)))
        else:
            reads.scored.append((first, ScoreSpec(0, start, [0] * count, num_top)))
    return reads


def _transfer_parts(transfers: RankTransfers) -> list[IntArray]:
    if transfers is NO_TRANSFERS:  # The common case.
        return [_NONE] * 3
    return [_transfers(transfers.begun), _ids(transfers.landed), _ids(transfers.awaited)]


def _ids(transfer_ids: Sequence[int]) -> IntArray:
    return _ints([transfer_id & _ID_MASK for transfer_id in transfer_ids])


def _transfers(transfers: Sequence[Transfer]) -> IntArray:
    numbers: list[int] = []
    for t in transfers:
        kinds = [t.to_host, t.of_windows]
        numbers += [t.transfer_id & _ID_MASK, *kinds, len(t.blocks), *t.blocks, *t.slots]
    return _ints(numbers)


def _read_transfers(numbers: Sequence[int]) -> tuple[Transfer, ...]:
    transfers, at = [], 0
    while at < len(numbers):
        transfer_id, to_host, of_windows, count = numbers[at : at + 4]
        slots_at, end = at + 4 + count, at + 4 + 2 * count
        blocks, slots = tuple(numbers[at + 4 : slots_at]), tuple(numbers[slots_at:end])
        transfers.append(Transfer(transfer_id, bool(to_host), blocks, slots, bool(of_windows)))
        at = end
    return tuple(transfers)


def _work(work: WorkList) -> list[IntArray]:
    facts = (work.narrow_is_even, work.tile_rows, work.num_shared_tokens, work.hides_keys)
    return [
        _ints(facts),
        work.narrow.reshape(-1),
        work.shared.reshape(-1),
        work.fills.reshape(-1),
        work.converted_fills.reshape(-1),
        work.converted_pages,
        work.token_order,
        work.slot_indptr,
        work.slot_of,
        _ints(work.dense),
    ]


def _read_work(parts: Sequence[IntArray]) -> WorkList:
    facts, *items, converted_pages, token_order, slot_indptr, slot_of, dense = parts
    is_even, tile_rows, num_shared_tokens, hides_keys = facts.tolist()
    narrow, shared, fills, converted_fills = (x.reshape(-1, ITEM_FIELDS) for x in items)
    return WorkList(
        narrow=narrow,
        narrow_is_even=bool(is_even),
        shared=shared,
        fills=fills,
        converted_fills=converted_fills,
        converted_pages=converted_pages,
        tile_rows=tile_rows,
        token_order=token_order,
        slot_indptr=slot_indptr,
        slot_of=slot_of,
        dense=tuple((first, count) for first, count in dense.reshape(-1, 2).tolist()),
        num_shared_tokens=num_shared_tokens,
        hides_keys=bool(hides_keys),
    )
