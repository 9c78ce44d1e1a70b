"""The compiled CPU kernels against float64. The result for a row does not depend on the other rows
of the step."""

import errno
import fcntl
import hashlib
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.engine.attention.quantised import PooledKV
from parrot.engine.attention.work_list import StepRows
from parrot.engine.cpu import attention as cpu_attention
from parrot.engine.cpu import layout, native
from parrot.engine.cpu.attention import PagedAttention, address_of
from parrot.engine.cpu.native import Kernels
from parrot.engine.kernels.attention_shape import AttentionShape, HeadNorm
from parrot.engine.models.decoder import QKNorm
from parrot.engine.models.layers import RMSNorm, Rope, rotate_
from parrot.engine.models.rope import inverse_frequencies
from parrot.engine.models.spec import RopeSpec
from tests.support.kernel_cases import Case, Request, make_case, relative_error

pytest.importorskip("numba")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
ROPE = RopeSpec(10000.0, "default", {})


@pytest.fixture(scope="module")
def kernels() -> dict[torch.dtype, Kernels]:
    return {dtype: native.load(str(dtype).removeprefix("torch.")) for dtype in TOLERANCE}


def make_pool(case: Case, page_size: int) -> torch.Tensor:
    """A pool with two layers. The step uses the second layer. The first layer is NaN, and unwritten
    slots in used pages are zero."""
    pool = torch.stack((case.k_cache, case.v_cache)).transpose(1, 2)
    used = ~pool.isnan().all(dim=-1).all(dim=-1, keepdim=True).unsqueeze(-1)
    pool = torch.where(used & pool.isnan(), 0.0, pool)
    pages = case.step.tables[case.step.requests, case.step.positions // page_size]
    pool[:, :, pages, case.step.positions % page_size] = 0.0  # The step writes these slots.
    return torch.stack((torch.full_like(pool, float("nan")), pool))


def run(
    case: Case, shape: AttentionShape, kernels: Kernels, *, pool: torch.Tensor | None = None
) -> torch.Tensor:
    """The output [tokens, heads, head_dim]. Heads are not rotated."""
    pool = make_pool(case, shape.page_size) if pool is None else pool
    frequencies = torch.zeros(shape.head_dim // 2)
    plain = PooledKV.plain(pool)
    attention = PagedAttention(plain, shape.num_heads, frequencies, [None] * 2, kernels, 64)
    attention.prepare(case.step)
    qkv = torch.cat((case.q, case.k_new, case.v_new), dim=1).flatten(1)
    out = attention.run(1, qkv).view(case.q.shape)
    assert pool[0].isnan().all()
    return out


PREFIX, LONGER = ("prefix", 22), ("longer", 300)


@settings(max_examples=60)
@given(
    shape=st.sampled_from([(1, 1, 32), (2, 3, 64), (3, 3, 64), (1, 4, 96), (2, 7, 128)]),
    page_size=st.sampled_from([4, 16, 24, 300]),
    requests=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.one_of(st.integers(0, 30), st.integers(240, 700)),
            st.sampled_from([1, 1, 1, 2, 5]),
        ),
        min_size=1,
        max_size=6,
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_random_contexts_match_the_reference(
    kernels: dict[torch.dtype, Kernels],
    shape: tuple[int, int, int],
    page_size: int,
    requests: list[tuple[int, int, int]],
    dtype: torch.dtype,
    threads: int,
    seed: int,
) -> None:
    """Contexts of all lengths in scattered pages, with shared prefixes. Each context alone gives
    the same bits."""
    kv_heads, group, dim = shape
    paths = [(), (PREFIX,), (PREFIX, LONGER)]
    whole = AttentionShape(kv_heads * group, kv_heads, dim, page_size)
    asked = [Request(paths[path], own, new) for path, own, new in requests]
    case = make_case(asked, whole, dtype=dtype, seed=seed)
    pool = make_pool(case, page_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "_LEAST_PARALLEL", 0)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        out = run(case, whole, kernels[dtype], pool=pool.clone())
        assert relative_error(out, case.expected) < TOLERANCE[dtype]
        patch.setattr(torch, "get_num_threads", lambda: 3 - threads)
        step, ends = case.step, case.step.q_first + case.step.q_lens
        for i, (first, end) in enumerate(zip(step.q_first, ends, strict=True)):
            at = slice(i, i + 1)
            alone = Case(
                **{
                    **{name: getattr(case, name) for name in case.__dataclass_fields__},
                    "step": StepRows(step.tables[at], step.starts[at], step.q_lens[at]),
                    "q": case.q[first:end],
                    "k_new": case.k_new[first:end],
                    "v_new": case.v_new[first:end],
                }
            )
            again = run(alone, whole, kernels[dtype], pool=pool.clone())
            assert torch.equal(again, out[first:end])


@pytest.mark.parametrize("scale", [0.0, 30.0])
def test_equal_and_extreme_scores(kernels: dict[torch.dtype, Kernels], scale: float) -> None:
    shape = AttentionShape(2, 1, 32, 16)
    requests = [Request((), 300), Request((), 3, 4), Request((), 0)]
    case = make_case(requests, shape, dtype=torch.float32, key_scale=scale)
    assert relative_error(run(case, shape, kernels[torch.float32]), case.expected) < 1e-5


def test_values_that_are_not_finite_affect_only_their_context(
    kernels: dict[torch.dtype, Kernels],
) -> None:
    shape = AttentionShape(2, 1, 32, 16)
    case = make_case([Request((), 9)] * 3, shape, dtype=torch.float32, seed=3)
    page = case.tables[1, 0]
    case.k_cache[page], case.v_cache[page] = float("inf"), float("inf")
    out = run(case, shape, kernels[torch.float32])
    assert out[1].isnan().all()
    assert relative_error(out[[0, 2]], case.expected[[0, 2]]) < 2e-6


@pytest.mark.parametrize("has_norms", [False, True])
def test_heads_are_rotated_as_in_torch(
    kernels: dict[torch.dtype, Kernels], has_norms: bool
) -> None:
    """Checks the stored keys, and queries that see one of two keys."""
    heads, kv_heads, dim, page_size, start = 4, 2, 64, 16, 1037
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(3, heads + 2 * kv_heads, dim, generator=generator)
    weights = torch.rand(2, dim, generator=generator) + 0.5
    norms = HeadNorm(weights[0], weights[1], 1e-3) if has_norms else None
    pool = torch.zeros(1, 2, kv_heads, 80, page_size, dim)
    table = torch.randperm(80, generator=generator)[None].int().numpy()
    attention = PagedAttention(
        PooledKV.plain(pool),
        heads,
        inverse_frequencies(ROPE, dim),
        [norms],
        kernels[torch.float32],
        8,
    )
    at = torch.tensor([start]).int().numpy()
    attention.prepare(StepRows(table, at, at * 0 + 3))
    out = attention.run(0, qkv.flatten(1)).view(3, heads, dim)
    turned = qkv[:, : heads + kv_heads].clone()
    if has_norms:
        weight = torch.cat((weights[0].expand(heads, -1), weights[1].expand(kv_heads, -1)))
        turned = QKNorm(weight, 1e-3)(turned)
    positions = torch.arange(start, start + 3)
    rotate_(turned, *Rope(ROPE, dim, torch.device("cpu")).angles(positions, torch.float32))
    pages = torch.from_numpy(table[0]).long()[positions // page_size]
    k, v = pool[0, :, :, pages, positions % page_size].transpose(1, 2)
    torch.testing.assert_close(k, turned[:, heads:], rtol=1e-4, atol=2e-4)
    assert torch.equal(v, qkv[:, heads + kv_heads :])
    keys, values = pool[0][:, :, pages[0].new_tensor(table[0])].flatten(2, 3)
    keys, values = keys[:, : start + 3].double(), values[:, : start + 3].double()
    q = turned[:, :heads].double().view(3, kv_heads, -1, dim)
    scores = torch.einsum("rkgd,ktd->rkgt", q, keys) * dim**-0.5
    hidden = torch.arange(start + 3) > positions[:, None, None, None]
    want = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
    assert relative_error(out, want.view(3, heads, dim)) < 1e-4


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_norms_and_gates(kernels: dict[torch.dtype, Kernels], dtype: torch.dtype) -> None:
    """The reference is torch in float32. One row has large numbers, and one row has a NaN."""
    rows, width = 5, 96
    generator = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(rows, width, generator=generator).to(dtype) for _ in "xr")
    x[1] *= 1000
    x[2, 3] = float("nan")
    weight = torch.rand(width, generator=generator).to(dtype).float()
    block = torch.tensor([rows, width, 0, width]).numpy()
    block.view("f4")[2 * layout.EPS] = 1e-5
    summed, normed, gated = residual.clone(), torch.empty_like(x), torch.empty_like(x)
    norm = torch.tensor([t.data_ptr() for t in (summed, weight, normed)]).numpy()
    kernels[dtype].add_rms_norm(x.data_ptr(), address_of(block), address_of(norm))
    assert torch.equal(summed.nan_to_num(0), (residual + x).nan_to_num(0))
    want = RMSNorm(weight, 1e-5)(summed.float())
    torch.testing.assert_close(normed.float(), want, rtol=8e-3, atol=1e-5, equal_nan=True)
    kernels[dtype].add_rms_norm(0, address_of(block), address_of(norm))
    torch.testing.assert_close(normed.float(), want, rtol=8e-3, atol=1e-5, equal_nan=True)
    both = torch.cat((x, residual), dim=1)
    kernels[dtype].silu_multiply(both.data_ptr(), address_of(block), gated.data_ptr())
    want = F.silu(x.float()) * residual.float()
    torch.testing.assert_close(gated.float(), want, rtol=8e-3, atol=1e-6, equal_nan=True)


def test_cached_code_is_read_only_if_it_is_complete_and_only_its_owner_can_write(
    tmp_path: Path,
) -> None:
    path, code = tmp_path / "folder" / "kernels.o", b"machine code"
    assert native.kept(path) is None
    native.keep(path, code)
    assert native.kept(path) == code
    assert [child.name for child in path.parent.iterdir()] == ["kernels.o"]
    path.chmod(0o666)
    assert native.kept(path) is None
    path.chmod(0o600)
    path.write_bytes(hashlib.sha256(code).digest() + code[:-1])
    assert native.kept(path) is None
    # This only logs a warning.
    native.keep(tmp_path / "folder" / "kernels.o" / "no folder" / "x.o", code)


def test_kernels_are_compiled_in_a_folder_without_file_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = pytest.importorskip("parrot.engine.cpu.build")

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with build._build_lock(tmp_path / "kernels.o"):
        pass


@pytest.mark.parametrize(
    ("status", "output", "message"),
    [(1, b"", "ImportError: no LLVM"), (0, b"hello\nmachine code", "something else wrote")],
)
def test_the_error_of_the_compiler_is_raised_by_the_future(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, output: bytes, message: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failed = subprocess.CompletedProcess([], status, output, b"Traceback\nImportError: no LLVM\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    future = native.start_loading("float32")
    assert future is not None
    with pytest.raises(RuntimeError, match=message):
        future.result(timeout=60)


def test_there_are_no_kernels_without_numba_or_for_other_types(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert native.start_loading("float16") is None
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    assert native.start_loading("float32") is None
