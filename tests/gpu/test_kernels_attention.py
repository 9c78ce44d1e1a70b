"""The attention kernels on the device, against float64. Every case runs twice with equal bits."""

import dataclasses
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np
import torch

from parrot.engine.attention.context_tree import GateConfig
from parrot.engine.attention.tree_attention import (
    Capacity,
    ConvertedPages,
    PlanBuffers,
    TreeAttention,
)
from parrot.engine.attention.work_list import SplitConfig, plan_work
from parrot.engine.kernels.attention_shape import AttentionShape, ScoreRule
from parrot.engine.kernels.launch import NewKV, is_hopper
from tests.support.kernel_cases import (
    SHARE_ALL,
    Case,
    Request,
    make_case,
    poison_outside_of_windows,
    relative_error,
)

pytestmark = pytest.mark.gpu

SYSTEM, APP = ("system", 200), ("app", 130)
DECODES = [
    Request((SYSTEM,), 7),
    Request((SYSTEM,), 63),
    Request((SYSTEM, APP), 1),
    Request((SYSTEM, APP), 300),
    Request((), 5),
] * 3
MIXED = [
    Request((SYSTEM,), 7, 9),
    Request((SYSTEM,), 63),
    Request((SYSTEM, APP), 1, 70),
    Request((SYSTEM, APP), 300),
    Request((), 0, 333),
]
CROWD = [Request((("long", 1000),), i) for i in range(40)]
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}


class Run:
    """A case on the device, with its plan and with NaN in all buffers."""

    def __init__(
        self,
        case: Case,
        shape: AttentionShape,
        *,
        gate: GateConfig | None = SHARE_ALL,
        split: SplitConfig | None = None,
        capacity: Capacity | None = None,
    ) -> None:
        device = torch.device("cuda")
        work = plan_work(case.step, shape, gate, split or SplitConfig(min_span=(64,) * 3))
        self.case = case
        self.plan = PlanBuffers(work, device, capacity)
        converted = ConvertedPages(
            self.plan.capacity.converted_pages, case.k_cache.shape[1:], case.q
        )
        for pages in (converted.k, converted.v):
            pages.fill_(float("nan"))
        self.attention = TreeAttention(shape, self.plan.capacity.slots, device, converted=converted)
        self.attention.partial_out.fill_(float("nan"))
        self.attention.partial_lse.fill_(float("nan"))
        self.out = torch.full_like(case.q, float("nan"))

    def launch(self, *, next_early: bool = False) -> None:
        new = NewKV(self.case.k_new, self.case.v_new)
        case, options = self.case, {"rule": self.case.rule, "next_early": next_early}
        self.attention.run(case.q, case.kv, self.plan, self.out, new, **options)

    def check(self) -> torch.Tensor:
        torch.cuda.synchronize()
        assert relative_error(self.out, self.case.expected) < TOLERANCE[self.case.q.dtype]
        return self.out.clone()


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("requests", [DECODES, MIXED, CROWD], ids=["decodes", "mixed", "crowd"])
@pytest.mark.parametrize(
    ("group", "kv_heads", "dim", "page"),
    [
        (4, 2, 128, 64),
        (1, 4, 128, 64),
        (3, 3, 64, 16),
        (3, 3, 64, 64),
        (8, 1, 128, 16),
        (2, 2, 64, 128),
        (1, 1, 64, 32),
    ],
)
def test_against_float64(
    requests: list[Request], group: int, kv_heads: int, dim: int, page: int, quantised: bool
) -> None:
    shape = AttentionShape(group * kv_heads, kv_heads, dim, page)
    case = make_case(requests, shape, dtype=torch.bfloat16, device="cuda", quantised=quantised)
    outputs = []
    for _ in range(2):
        run = Run(case, shape)
        run.launch()
        outputs.append(run.check())
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.skipif(
    torch.cuda.is_available() and not is_hopper(torch.device("cuda")), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 200, 1000, 9000])
@pytest.mark.parametrize(
    ("group", "kv_heads", "dim", "page"), [(4, 2, 128, 64), (1, 3, 64, 128), (16, 1, 128, 64)]
)
@pytest.mark.parametrize("next_early", [False, True])
def test_one_token_whose_kv_is_copied_early(
    length: int,
    group: int,
    kv_heads: int,
    dim: int,
    page: int,
    next_early: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages are in random order, and have NaN after the end of the context."""
    launched: list[int] = []
    early_items = TreeAttention._early_items

    def count(*args: Any) -> None:
        launched.append(1)
        early_items(*args)

    monkeypatch.setattr(TreeAttention, "_early_items", count)
    shape = AttentionShape(group * kv_heads, kv_heads, dim, page)
    case = make_case([Request((), length - 1)], shape, dtype=torch.bfloat16, device="cuda")
    run = Run(case, shape)
    run.launch(next_early=next_early)
    run.check()
    assert launched == [1]


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("requests", [DECODES, MIXED, CROWD], ids=["decodes", "mixed", "crowd"])
@pytest.mark.parametrize(("dim", "page"), [(128, 64), (256, 64), (128, 16), (256, 32)])
@pytest.mark.parametrize("window", [40, 512])
def test_pages_outside_of_all_windows_are_not_read(
    requests: list[Request], dim: int, page: int, window: int, quantised: bool
) -> None:
    shape, rule = AttentionShape(8, 4, dim, page), ScoreRule(0.0625, window=window)
    options = {"device": "cuda", "quantised": quantised, "rule": rule}
    case = make_case(requests, shape, dtype=torch.bfloat16, **options)
    poison_outside_of_windows(case, shape)
    run = Run(case, shape)
    run.launch()
    run.check()


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("requests", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize(
    "rule",
    [
        ScoreRule(0.3),
        ScoreRule(0.0625, softcap=50.0),
        ScoreRule(0.0625, window=100),
        ScoreRule(0.0625, softcap=3.0, window=1000),
    ],
    ids=str,
)
def test_scales_caps_and_windows(
    requests: list[Request], dim: int, rule: ScoreRule, quantised: bool
) -> None:
    shape = AttentionShape(8, 4, dim, 64)
    options = {"device": "cuda", "quantised": quantised, "rule": rule}
    run = Run(make_case(requests, shape, dtype=torch.bfloat16, **options), shape)
    run.launch()
    run.check()


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("page", [16, 64])
def test_other_precisions(dtype: torch.dtype, page: int, quantised: bool) -> None:
    shape = AttentionShape(4, 1, 64, page)
    run = Run(make_case(DECODES, shape, dtype=dtype, device="cuda", quantised=quantised), shape)
    run.launch()
    run.check()


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("key_scale", [0.0, 30.0])
def test_equal_scores_and_dominant_keys(key_scale: float, quantised: bool) -> None:
    shape = AttentionShape(8, 2, 128, 64)
    case = make_case(
        MIXED, shape, dtype=torch.bfloat16, device="cuda", quantised=quantised, key_scale=key_scale
    )
    run = Run(case, shape)
    run.launch()
    torch.cuda.synchronize()
    assert relative_error(run.out, case.expected) < 5e-3


@pytest.mark.parametrize("quantised", [False, True])
def test_shared_and_unshared_plans_agree(quantised: bool) -> None:
    shape = AttentionShape(8, 2, 128, 64)
    case = make_case(CROWD, shape, dtype=torch.bfloat16, device="cuda", quantised=quantised)
    runs = [Run(case, shape), Run(case, shape, gate=None)]
    for run in runs:
        run.launch()
    torch.cuda.synchronize()
    assert len(runs[0].plan.shared)
    assert not len(runs[1].plan.shared)
    assert relative_error(runs[0].out, runs[1].out.double().cpu()) < 5e-3


@pytest.mark.parametrize("quantised", [False, True])
def test_a_graph_replays_another_plan_in_the_same_buffers(quantised: bool) -> None:
    shape = AttentionShape(8, 2, 128, 64)
    first = make_case(DECODES, shape, dtype=torch.bfloat16, device="cuda", quantised=quantised)
    # The same batch with other shared nodes and splits. The capacity fits both plans.
    split = SplitConfig(min_span=(128,) * 3)
    plans = [plan_work(first.step, shape, g, s) for g, s in ((SHARE_ALL, split), (None, split))]
    needs = [dataclasses.astuple(Capacity.of(work)) for work in plans]
    capacity = Capacity(*(max(sizes) + 3 for sizes in zip(*needs, strict=True)))
    if not quantised:  # Plain pages are never converted.
        capacity = dataclasses.replace(capacity, converted_fills=0, converted_pages=0)
    run = Run(first, shape, split=split, capacity=capacity)
    run.launch()
    run.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.launch()
    for work in (plans[1], plans[0], plans[1]):
        run.plan.upload(work)
        run.out.fill_(float("nan"))
        graph.replay()
        run.check()


@pytest.mark.parametrize("quantised", [False, True])
def test_a_plan_stays_valid_while_its_sequences_grow(quantised: bool) -> None:
    shape = AttentionShape(4, 1, 128, 64)
    requests = [Request((SYSTEM,), 70 + i) for i in range(6)]
    case = make_case(requests, shape, dtype=torch.bfloat16, device="cuda", quantised=quantised)
    earlier = dataclasses.replace(case.step, starts=case.step.starts - 60)
    work = plan_work(earlier, shape, SHARE_ALL, SplitConfig())
    run = Run(case, shape, split=SplitConfig(), capacity=Capacity.of(work))
    run.plan.upload(work)
    run.launch()
    torch.cuda.synchronize()
    assert relative_error(run.out, case.expected) < 5e-3


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.slow
def test_a_large_step_of_decodes_and_fills(quantised: bool) -> None:
    shape = AttentionShape(32, 8, 128, 64)
    random = np.random.default_rng(0)
    requests = [
        Request((("a", 2048), (f"b{i % 3}", 500)), int(random.integers(0, 200))) for i in range(48)
    ]
    requests += [Request((("a", 2048),), 10, 700), Request((), 0, 1000)]
    case = make_case(requests, shape, dtype=torch.bfloat16, device="cuda", quantised=quantised)
    run = Run(case, shape, gate=GateConfig(), split=SplitConfig())
    run.launch()
    run.check()


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(
    ("group", "kv_heads", "dim", "dtype"),
    [
        (4, 2, 128, torch.bfloat16),
        (1, 4, 64, torch.bfloat16),
        (3, 3, 64, torch.float16),
        (4, 1, 64, torch.float32),
    ],
)
def test_fills_that_read_converted_pages(
    group: int, kv_heads: int, dim: int, page: int, dtype: torch.dtype
) -> None:
    shape = AttentionShape(group * kv_heads, kv_heads, dim, page)
    requests = [*MIXED, Request((SYSTEM, APP), 9, 300), Request((), 700, 130), Request((), 40, 200)]
    case = make_case(requests, shape, dtype=dtype, device="cuda", quantised=True)
    split = SplitConfig(
        min_span=(64,) * 3, converted_pages=1500 // page, converted_rows=100 * group
    )
    run = Run(case, shape, split=split)
    assert len(run.plan.converted_fills)
    assert len(run.plan.fills)
    run.launch()
    first = run.check()
    run.launch()
    assert torch.equal(run.check(), first)
    roomy = dataclasses.replace(run.plan.capacity, converted_pages=999, converted_fills=99)
    graphed = Run(case, shape, split=split, capacity=roomy)
    graphed.launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.launch()
    graphed.out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(graphed.check(), first)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(("group", "kv_heads", "dim"), [(4, 2, 128), (1, 4, 64), (3, 3, 64)])
def test_dense_prefixes_of_fills(group: int, kv_heads: int, dim: int, quantised: bool) -> None:
    shape = AttentionShape(group * kv_heads, kv_heads, dim, 64)
    requests = [*MIXED, Request((), 0, 1500), Request((), 0, 1024)]
    case = make_case(requests, shape, dtype=torch.bfloat16, device="cuda", quantised=quantised)
    split = SplitConfig(min_span=(64,) * 3, dense=512, dense_min=1024)
    runs = [Run(case, shape, split=split) for _ in range(2)]
    for one in runs:
        one.launch()
    torch.cuda.synchronize()
    assert relative_error(runs[0].out, case.expected) < TOLERANCE[torch.bfloat16]
    assert torch.equal(runs[0].out, runs[1].out)
