"""The attention kernels in Triton's interpreter, against float64: outputs and log-sum-exps."""

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.attention import tree_attention
from parrot.engine.attention.context_tree import GateConfig
from parrot.engine.attention.tree_attention import (
    Capacity,
    ConvertedPages,
    KernelConfig,
    PlanBuffers,
    TileConfig,
    TreeAttention,
)
from parrot.engine.attention.work_list import SplitConfig, StepRows, plan_work
from parrot.engine.kernels import attention_kernels
from parrot.engine.kernels.attention_shape import AttentionShape, ScoreRule
from parrot.engine.kernels.launch import NewKV
from tests.support.kernel_cases import (
    SHARE_ALL,
    Case,
    Request,
    make_case,
    poison_outside_of_windows,
    relative_error,
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or "Interpreted" not in type(attention_kernels.attend_items).__name__,
    reason="the kernels were imported for a device; tests/gpu runs these cases",
)

CPU = torch.device("cpu")
SPLITS = SplitConfig(num_sms=8, min_span=(64,) * 3)
SYSTEM, APP = ("system", 70), ("app", 37)
MIXED = [
    Request((SYSTEM,), 7),
    Request((SYSTEM, APP), 1),
    Request((SYSTEM, APP), 30),
    Request((SYSTEM,), 17),
    Request((), 5),
]


def run(
    case: Case,
    shape: AttentionShape,
    *,
    gate: GateConfig | None = SHARE_ALL,
    split: SplitConfig = SPLITS,
    config: KernelConfig | None = None,
    spare: int = 0,
    only_last: bool = False,
    times: int = 1,
) -> torch.Tensor:
    """The output of the kernels. All buffers are NaN before each run, and all runs must give the
    same bits."""
    work = plan_work(case.step, shape, gate, split)
    need = Capacity.of(work)
    capacity = replace(
        need,
        narrow=need.narrow + spare,
        shared=need.shared + spare,
        slots=need.slots + spare,
        converted_fills=need.converted_fills + spare,
        converted_pages=need.converted_pages + spare,
    )
    plan = PlanBuffers(work, CPU, capacity)
    converted = ConvertedPages(capacity.converted_pages, case.k_cache.shape[1:], case.q)
    for pages in (converted.k, converted.v):
        pages.fill_(float("nan"))
    attention = TreeAttention(
        shape, work.num_slots + spare, CPU, config, converted=converted, upcast=True
    )
    results = []
    new = NewKV(case.k_new, case.v_new)
    for _ in range(times):
        attention.partial_out.fill_(float("nan"))
        attention.partial_lse.fill_(float("nan"))
        out = torch.full_like(case.q, float("nan"))
        options = {"rule": case.rule, "only_last": only_last}
        results.append(attention.run(case.q, case.kv, plan, out, new, **options))
    first, *others = results
    for other in others:  # Rows that the kernel does not write stay NaN.
        assert torch.equal(first.nan_to_num(1e9), other.nan_to_num(1e9))
    return first


def check(case: Case, out: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert relative_error(out, case.expected) < tolerance


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(
    ("group", "kv_heads", "dim", "page"),
    [
        (1, 2, 64, 16),
        (2, 1, 128, 16),
        (3, 1, 64, 64),
        (4, 1, 128, 64),
        (8, 1, 64, 16),
        (3, 3, 64, 16),
    ],
)
def test_decodes_under_a_tree(
    group: int, kv_heads: int, dim: int, page: int, quantised: bool
) -> None:
    shape = AttentionShape(group * kv_heads, kv_heads, dim, page)
    case = make_case(MIXED, shape, dtype=torch.float32, quantised=quantised)
    check(case, run(case, shape, times=2))


RULES = [
    ScoreRule(0.3),
    ScoreRule(0.125, softcap=1.5),
    *(ScoreRule(0.125, window=window) for window in (1, 5, 64, 100)),
    ScoreRule(0.2, softcap=3.0, window=33),
]


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_scales_caps_and_windows(rule: ScoreRule, page: int, quantised: bool) -> None:
    kv_heads = 2 if rule is RULES[-1] else 1
    shape = AttentionShape(2 * kv_heads, kv_heads, 64, page)
    requests = [*MIXED, Request((SYSTEM, APP), 1, 33), Request((), 90, 40), Request((), 0, 70)]
    case = make_case(requests, shape, dtype=torch.float32, quantised=quantised, rule=rule)
    check(case, run(case, shape))


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(("window", "kv_heads"), [(5, 1), (33, 2), (64, 1)])
def test_pages_outside_of_all_windows_are_not_read(
    window: int, kv_heads: int, page: int, quantised: bool
) -> None:
    """Other contexts may have written NaN to these pages."""
    shape = AttentionShape(2 * kv_heads, kv_heads, 64, page)
    rule = ScoreRule(0.125, window=window)
    requests = [
        *MIXED,
        Request((SYSTEM, APP), 1, 33),
        Request((), 300, 40),
        Request((SYSTEM,), 230),
    ]
    case = make_case(requests, shape, dtype=torch.float32, quantised=quantised, rule=rule)
    assert poison_outside_of_windows(case, shape) > 3
    check(case, run(case, shape))


@pytest.mark.parametrize("rule", RULES[-2:], ids=str)
def test_windows_of_fills_that_read_converted_pages(rule: ScoreRule) -> None:
    shape = AttentionShape(2, 1, 64, 64)
    requests = [Request((SYSTEM,), 7, 90), Request((), 150, 60), Request((SYSTEM,), 17)]
    case = make_case(requests, shape, dtype=torch.float32, quantised=True, rule=rule)
    split = replace(SPLITS, converted_pages=6, converted_rows=50)
    assert len(plan_work(case.step, shape, SHARE_ALL, split).converted_fills)
    check(case, run(case, shape, split=split))


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(("group", "kv_heads", "page"), [(1, 1, 16), (3, 2, 64), (4, 1, 64)])
def test_fills_with_cached_prefixes_and_decodes(
    group: int, kv_heads: int, page: int, quantised: bool
) -> None:
    shape = AttentionShape(kv_heads * group, kv_heads, 64, page)
    requests = [
        Request((SYSTEM,), 7, 9),
        Request((SYSTEM,), 17),
        Request((SYSTEM, APP), 90, 33),
        Request((), 0, 70),
    ]
    case = make_case(requests, shape, dtype=torch.float32, quantised=quantised)
    check(case, run(case, shape))


@pytest.mark.parametrize(
    ("group", "kv_heads", "page", "spare", "times"),
    [(1, 2, 16, 0, 2), (3, 2, 64, 3, 1), (4, 1, 64, 0, 2)],
)
def test_fills_that_read_converted_pages(
    group: int, kv_heads: int, page: int, spare: int, times: int
) -> None:
    shape = AttentionShape(kv_heads * group, kv_heads, 64, page)
    requests = [
        Request((SYSTEM,), 7, 90),
        Request((SYSTEM,), 17),
        Request((SYSTEM, APP), 1, 33),
        Request((), 0, 70),
        Request((), 150, 60),
    ]
    case = make_case(requests, shape, dtype=torch.float32, quantised=True)
    split = replace(SPLITS, converted_pages=400 // page, converted_rows=50 * group)
    work = plan_work(case.step, shape, SHARE_ALL, split)
    assert len(work.converted_fills)
    assert len(work.fills)
    check(case, run(case, shape, split=split, spare=spare, times=times))


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("only_last", [False, True])
def test_dense_prefixes_of_fills(only_last: bool, quantised: bool) -> None:
    shape = AttentionShape(4, 2, 64, 64)
    requests = [
        Request((SYSTEM,), 7),
        Request((), 0, 70),
        Request((SYSTEM,), 1, 64),
        Request((), 0, 64),
    ]
    case = make_case(requests, shape, dtype=torch.float32, quantised=quantised)
    split = SplitConfig(num_sms=8, min_span=(64,) * 3, dense=32, dense_min=64)
    out = run(case, shape, split=split, only_last=only_last)
    rows = torch.tensor([0, 70, 134, 198]) if only_last else slice(None)
    assert relative_error(out[rows], case.expected[rows]) < 1e-5


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 129])
def test_lengths_around_the_page(length: int, quantised: bool) -> None:
    shape = AttentionShape(2, 1, 64, 64)
    requests = [Request((), length - 1), Request((("p", length),), 0), Request((("p", length),), 3)]
    case = make_case(requests, shape, dtype=torch.float32, quantised=quantised)
    check(case, run(case, shape))


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("min_span", [64, 128, 10**6])
def test_any_number_of_splits_gives_the_same_answer(min_span: int, quantised: bool) -> None:
    shape = AttentionShape(4, 1, 64, 16)
    case = make_case(
        [Request((), 1200), Request((), 129)], shape, dtype=torch.float32, quantised=quantised
    )
    check(case, run(case, shape, split=SplitConfig(num_sms=100, min_span=(min_span,) * 3)))


@pytest.mark.parametrize("quantised", [False, True])
def test_shared_and_unshared_plans_agree(quantised: bool) -> None:
    shape = AttentionShape(4, 1, 64, 16)
    case = make_case(MIXED, shape, dtype=torch.float32, quantised=quantised)
    shared = run(case, shape)
    alone = run(case, shape, gate=None)
    assert relative_error(shared, alone.double()) < 1e-6


def test_a_program_merges_several_heads_in_large_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(16, 4, 16, 16)
    case = make_case([*MIXED, Request((), 100)], shape, dtype=torch.float32)
    few = run(case, shape)
    monkeypatch.setattr(tree_attention, "_MANY_TOKENS", 64)
    many = run(case, shape)
    check(case, many)
    assert many.equal(few)


@pytest.mark.parametrize("quantised", [False, True])
def test_many_sharers_fill_several_tiles(quantised: bool) -> None:
    shape = AttentionShape(4, 1, 64, 64)
    requests = [Request((("x", 130),), 1 + i) for i in range(18)]
    case = make_case(requests, shape, dtype=torch.float32, quantised=quantised)
    check(case, run(case, shape))


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("key_scale", [0.0, 30.0])
def test_equal_scores_and_dominant_keys(key_scale: float, quantised: bool) -> None:
    shape = AttentionShape(2, 1, 64, 16)
    case = make_case(MIXED, shape, dtype=torch.float32, quantised=quantised, key_scale=key_scale)
    check(case, run(case, shape))


def test_half_precision_storage() -> None:
    shape = AttentionShape(2, 1, 64, 16)
    case = make_case(MIXED, shape, dtype=torch.float16)
    check(case, run(case, shape), tolerance=1e-3)


@pytest.mark.parametrize("quantised", [False, True])
def test_a_plan_stays_valid_while_its_sequences_grow(quantised: bool) -> None:
    shape = AttentionShape(2, 1, 64, 16)
    # The plan is 8 tokens older than the step.
    grown = [r if r.own >= 8 else Request(r.path, r.own + 8) for r in MIXED]
    now = make_case(grown, shape, dtype=torch.float32, quantised=quantised)
    earlier = StepRows(now.step.tables, now.step.starts - 8, now.step.q_lens)
    work = plan_work(earlier, shape, SHARE_ALL, SPLITS)
    plan = PlanBuffers(work, CPU)
    attention = TreeAttention(shape, work.num_slots, CPU, upcast=True)
    out = torch.full_like(now.q, float("nan"))
    attention.run(now.q, now.kv, plan, out)
    assert relative_error(out, now.expected) < 1e-5


@pytest.mark.parametrize("quantised", [False, True])
def test_a_smaller_plan_in_larger_buffers(quantised: bool) -> None:
    shape = AttentionShape(2, 1, 64, 16)
    case = make_case(MIXED, shape, dtype=torch.float32, quantised=quantised)
    check(case, run(case, shape, spare=5))


@pytest.mark.parametrize("quantised", [False, True])
def test_tiles_of_keys_that_span_pages_and_tiles_smaller_than_a_page(quantised: bool) -> None:
    for page, keys in ((16, 64), (64, 32), (128, 64)):
        shape = AttentionShape(2, 1, 64, page)
        case = make_case(MIXED, shape, dtype=torch.float32, quantised=quantised)
        narrow = TileConfig(keys, 4, 2)
        check(case, run(case, shape, config=KernelConfig(deep=narrow, light=narrow)))


def test_a_query_that_is_a_slice_of_a_wider_row() -> None:
    shape = AttentionShape(2, 1, 64, 16)
    case = make_case(MIXED, shape, dtype=torch.float32)
    wide = torch.full((len(case.q), 4, 64), float("nan"))
    wide[:, :2] = case.q
    case.q = wide[:, :2]
    work = plan_work(case.step, shape, SHARE_ALL, SPLITS)
    plan = PlanBuffers(work, CPU)
    out = torch.full((len(wide), 2, 64), float("nan"))
    attention = TreeAttention(shape, work.num_slots, CPU, upcast=True)
    assert relative_error(attention.run(case.q, case.kv, plan, out), case.expected) < 1e-5


def test_too_small_buffers_are_refused() -> None:
    shape = AttentionShape(2, 1, 64, 16)
    case = make_case(MIXED, shape, dtype=torch.float32)
    work = plan_work(case.step, shape, SHARE_ALL, SPLITS)
    need = Capacity.of(work)
    small = Capacity(need.num_tokens, need.narrow - 1, 9, 9, need.slots)
    with pytest.raises(AssertionError, match="Capacity"):
        PlanBuffers(work, CPU, small)
