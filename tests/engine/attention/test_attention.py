"""The torch backend computes any plan exactly. The reference is float64 attention over the tokens
of each context."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.engine.attention import torch_attention as attention
from parrot.engine.attention.context_tree import GateConfig
from parrot.engine.attention.quantised import PooledKV
from parrot.engine.attention.torch_attention import (
    WHOLE_SPANS,
    Causal,
    TorchAttention,
    attend,
    attend_causal,
    merge,
)
from parrot.engine.attention.work_list import SplitConfig, WorkList, plan_work
from parrot.engine.kernels.attention_shape import AttentionShape, ScoreRule, plain_rule
from tests.support.kernel_cases import SHARE_ALL, Case, Request, make_case, relative_error

BLOCK = 4
SMALL_SPLITS = SplitConfig(num_sms=4, min_span=(8,) * 3, tile_rows=16)
SMALL_WHOLE = replace(WHOLE_SPANS, narrow_rows=6, tile_rows=8)
PREFIX, LONGER = ("prefix", 22), ("longer", 17)


def run(
    case: Case, shape: AttentionShape, gate: GateConfig | None, split: SplitConfig = WHOLE_SPANS
) -> tuple[torch.Tensor, WorkList]:
    """The output [tokens, heads, head_dim] for a pool as the engine would have it. Unwritten slots
    in a context's own blocks are zeros, and blocks without an owner are NaN."""
    pool = torch.stack((case.k_cache, case.v_cache)).transpose(1, 2)
    used = ~pool.isnan().all(dim=-1).all(dim=-1, keepdim=True).unsqueeze(-1)
    pool = torch.where(used & pool.isnan(), 0.0, pool)
    blocks = case.step.tables[case.step.requests, case.step.positions // shape.page_size]
    pool[:, :, blocks, case.step.positions % shape.page_size] = 0.0  # The step writes these slots.
    pool = torch.stack((torch.full_like(pool, float("nan")), pool))
    backend = TorchAttention(PooledKV.plain(pool), shape.num_heads, [case.rule] * 2)
    work = plan_work(case.step, shape, gate, split)
    plan = backend.plan(work, case.step)
    out = backend.run(1, case.q, case.k_new, case.v_new, plan)
    assert pool[0].isnan().all()
    return out.view(case.q.shape), work


@settings(max_examples=100)
@given(
    shape=st.sampled_from([(1, 1, 8), (2, 3, 16), (3, 3, 64), (1, 4, 8), (2, 6, 4)]),
    requests=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 30), st.sampled_from([1, 1, 1, 2, 7, 13])),
        min_size=1,
        max_size=9,
    ),
    gate=st.sampled_from([SHARE_ALL, GateConfig(row_tile=8), None]),
    split=st.sampled_from([WHOLE_SPANS, SMALL_WHOLE, SMALL_SPLITS]),
    seed=st.integers(0, 99),
    window=st.sampled_from([None, None, 1, 5, 9, 30, 1000]),
    softcap=st.sampled_from([None, None, 1.5]),
)
def test_random_trees_match_the_reference(
    shape: tuple[int, int, int],
    requests: list[tuple[int, int, int]],
    gate: GateConfig | None,
    split: SplitConfig,
    seed: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """Trees of contexts, with decodes and fills in one step, split as for a CPU and as for the
    kernels."""
    kv_heads, group, dim = shape
    paths = [(), (PREFIX,), (PREFIX, LONGER), (("other", 9),)]
    case = make_case(
        [Request(paths[path], own, new) for path, own, new in requests],
        AttentionShape(kv_heads * group, kv_heads, dim, BLOCK),
        dtype=torch.float32,
        seed=seed,
        rule=ScoreRule(dim**-0.5, softcap, window),
    )
    out, _ = run(case, AttentionShape(kv_heads * group, kv_heads, dim, BLOCK), gate, split)
    assert relative_error(out, case.expected) < 2e-6


@pytest.mark.parametrize("gate", [SHARE_ALL, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_levels_of_sharing(gate: GateConfig | None, dtype: torch.dtype) -> None:
    shape = AttentionShape(9, 3, 16, BLOCK)
    requests = [Request((PREFIX, LONGER, ("last", 9)), own) for own in (0, 3, 9)]
    requests += [Request((PREFIX, LONGER), 17), Request((PREFIX,), 40), Request((), 5)]
    case = make_case(requests, shape, dtype=dtype)
    out, work = run(case, shape, gate)
    assert relative_error(out, case.expected) < (2e-6 if dtype == torch.float32 else 8e-3)
    assert (work.num_shared_tokens > 0) == (gate is not None)


@pytest.mark.parametrize(
    "lengths", [[1], [3], [4], [5], [0, 4, 8], [1, 2, 3, 4, 5], [0, 0], [30, 1]]
)
def test_lengths_around_a_block(lengths: list[int]) -> None:
    shape = AttentionShape(4, 2, 8, BLOCK)
    case = make_case([Request((), n) for n in lengths], shape, dtype=torch.float32)
    assert relative_error(run(case, shape, None)[0], case.expected) < 2e-6


@pytest.mark.parametrize("scale", [0.0, 30.0])
def test_equal_and_extreme_scores(scale: float) -> None:
    """Scores of +-1000, and a prefix with almost all of the weight."""
    shape = AttentionShape(2, 1, 8, BLOCK)
    requests = [Request((PREFIX,), 3), Request((PREFIX,), 3, 4), Request((PREFIX,), 0)]
    case = make_case(requests, shape, dtype=torch.float32, key_scale=scale)
    assert relative_error(run(case, shape, SHARE_ALL)[0], case.expected) < 1e-5


def test_nan_in_one_context_stays_there() -> None:
    shape = AttentionShape(2, 1, 8, BLOCK)
    case = make_case([Request((), 9)] * 3, shape, dtype=torch.float32, seed=3)
    block = case.tables[1, 0]
    case.k_cache[block], case.v_cache[block] = float("inf"), float("inf")
    out, _ = run(case, shape, None)
    assert out[1].isnan().all()
    assert relative_error(out[[0, 2]], case.expected[[0, 2]]) < 2e-6


def test_the_new_kv_is_written_to_its_layer_and_its_slots_only() -> None:
    shape = AttentionShape(2, 2, 8, BLOCK)
    case = make_case([Request((), 4, 2)], shape, dtype=torch.float32, seed=5)
    pool = torch.zeros(2, 2, 2, len(case.k_cache), BLOCK, 8)
    backend = TorchAttention(PooledKV.plain(pool), 2)
    work = plan_work(case.step, shape, None, WHOLE_SPANS)
    backend.run(0, case.q, case.k_new, case.v_new, backend.plan(work, case.step))
    written = pool[0, :, :, case.tables[0, 1], :2].clone()
    assert torch.equal(written, torch.stack((case.k_new, case.v_new)).transpose(1, 2))
    pool[0, :, :, case.tables[0, 1], :2] = 0
    assert not pool.any()


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` in float64, with a mask for all scores."""
    scores = q.double() @ k.double().transpose(1, 2) * q.shape[-1] ** -0.5 + mask
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


def some_qkv(
    batch: int, rows: int, length: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch * rows + length)
    sizes = ((batch, rows, dim), (batch, length, dim), (batch, length, dim))
    q, k, v = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return q, k, v


TOLERANCES = [(torch.float32, 1e-5), (torch.bfloat16, 0.02)]


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_masked_items(dtype: torch.dtype, tolerance: float, rows: int) -> None:
    """Items with 2500 keys: 300 rows need several blocks."""
    q, k, v = some_qkv(4, rows, 2500, 16, dtype)
    mask = torch.zeros(4, 1, 2500, dtype=dtype)
    mask[::2, 0, 1:] = mask[1::2, 0, 2000:] = float("-inf")
    want, want_lse = reference(q, k, v, mask)
    for with_lse in (False, True):
        out, lse = attend(q, k, v, plain_rule(q.shape[-1]), mask=mask, with_lse=with_lse)
        assert out.dtype is dtype
        assert relative_error(out, want) < tolerance
        assert (lse is not None) == with_lse
    assert lse is not None
    torch.testing.assert_close(lse.double(), want_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shared_mask", [None, (1, 1), (1, 70), (6, 1), (6, 70)])
def test_scores_of_long_contexts_are_computed_in_parts(
    shared_mask: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part has at most `_MOST_SCORES` scores, for some heads and rows. The results are those
    of one computation."""
    q, k, v = some_qkv(6, 70, 500, 8)
    mask = None if shared_mask is None else torch.randn((*shared_mask, 500))
    want, want_lse = attend(q, k, v, plain_rule(q.shape[-1]), mask=mask, with_lse=True)
    most = 2 * attention.LEAST_ROWS * 500
    monkeypatch.setattr(attention, "SCORES", 1)
    monkeypatch.setattr(attention, "_MOST_SCORES", most)
    counts, compute = [], attention._attend

    def counted(add_product: Any, q: torch.Tensor, k: torch.Tensor, *rest: Any) -> Any:
        counts.append(q.shape[0] * q.shape[1] * k.shape[1])
        return compute(add_product, q, k, *rest)

    monkeypatch.setattr(attention, "_attend", counted)
    out, lse = attend(q, k, v, plain_rule(q.shape[-1]), mask=mask, with_lse=True)
    assert max(counts) <= most
    assert sum(counts) == 6 * 70 * 500
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("block", [1, 16, 70])
@pytest.mark.parametrize("past", [0, 600])
def test_causal_attention_block_by_block(
    dtype: torch.dtype, tolerance: float, block: int, past: int
) -> None:
    """70 tokens, with three query heads for each KV head. Memory after the keys and values is not
    read."""
    q, k, v = some_qkv(2, 210, past + 70, 16, dtype)
    hidden = torch.arange(past + 70) > past + torch.arange(70).repeat_interleave(3)[:, None]
    whole = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
    causal = Causal(past + 70, 3, whole[: 3 * block, past : past + block].to(dtype), None)
    after_k, after_v = (torch.nn.functional.pad(x, (0, 0, 0, 6), value=torch.nan) for x in (k, v))
    out, lse = attend_causal(q, after_k, after_v, plain_rule(q.shape[-1]), causal, with_lse=True)
    want, want_lse = reference(q, k, v, whole)
    assert relative_error(out, want) < tolerance
    assert lse is not None
    torch.testing.assert_close(lse.double(), want_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 70, 200])
def test_long_fills_with_decodes_in_the_same_step(dtype: torch.dtype, window: int | None) -> None:
    """A fill from position 0 and a fill that continues a context need a call each. All other items
    share one call."""
    shape = AttentionShape(6, 2, 16, BLOCK)
    requests = [
        Request((), 0, 180),
        Request((), 200, 90),
        Request((), 30),
        Request((PREFIX,), 9, 3),
    ]
    rule = ScoreRule(0.25, window=window)
    case = make_case(requests, shape, dtype=dtype, seed=2, rule=rule)
    tolerance = 2e-6 if dtype is torch.float32 else 0.02
    assert relative_error(run(case, shape, None)[0], case.expected) < tolerance


def test_merged_parts_equal_attention_over_all_keys() -> None:
    q, k, v = some_qkv(2, 3, 20, 8)
    parts = [
        attend(q, k[:, a:b], v[:, a:b], plain_rule(8), with_lse=True)
        for a, b in [(0, 3), (3, 4), (4, 20)]
    ]
    parts.append((torch.zeros_like(q), torch.full((2, 3), float("-inf"))))
    outs = torch.stack([out.transpose(0, 1) for out, _ in parts], dim=1)
    lses = torch.stack([lse.T for _, lse in parts if lse is not None], dim=1)
    want = attend(q, k, v, plain_rule(8))[0].transpose(0, 1)
    torch.testing.assert_close(merge(outs, lses), want, rtol=1e-5, atol=1e-6)
