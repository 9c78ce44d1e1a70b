"""The compiled prompt attention against float64 and torch, with different numbers of threads."""

from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.engine.attention.torch_attention import cpu_gate
from parrot.engine.cpu import native
from parrot.engine.cpu.attention import PromptAttention
from parrot.engine.cpu.forward import CompiledLayers
from parrot.engine.cpu.native import Kernels
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.runner.cpu import CpuOptions, MakeLayers, ModelRunner
from tests.support.runner_driver import Driver
from tests.support.tiny_model import make_tiny_model

pytest.importorskip("numba")

TOLERANCE = 8e-3


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    kernels = native.load("bfloat16")
    if kernels.attend_prompt is None:
        pytest.skip("needs a CPU with AVX512_BF16")
    return kernels


def expected(q: torch.Tensor, kv: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference in float64: out [tokens, heads, head_dim] and log-sum-exps [tokens, heads]."""
    num_tokens, heads, head_dim = q.shape
    keys, values = kv[:, :, :num_keys].double().repeat_interleave(heads // kv.shape[1], 1)
    scores = torch.einsum("thd,hkd->htk", q.double(), keys) * head_dim**-0.5
    hidden = torch.ones(num_tokens, num_keys, dtype=torch.bool).triu(num_keys - num_tokens + 1)
    scores.masked_fill_(hidden, -torch.inf)
    return torch.einsum("htk,hkd->thd", scores.softmax(-1), values), scores.logsumexp(-1).mT


@settings(max_examples=60, deadline=None)
@given(
    heads=st.sampled_from([(1, 1, 64), (2, 3, 64), (3, 1, 128), (1, 7, 192)]),
    num_tokens=st.integers(6, 150),
    num_before=st.integers(0, 200),
    num_after=st.integers(0, 20),
    size=st.sampled_from([1.0, 30.0]),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 99),
)
def test_prompt_attention_matches_the_reference(
    kernels: Kernels,
    heads: tuple[int, int, int],
    num_tokens: int,
    num_before: int,
    num_after: int,
    size: float,
    threads: int,
    seed: int,
) -> None:
    """Keys after the last token are NaN, and the queries are a slice of a wider row."""
    kv_heads, group, head_dim = heads
    torch.manual_seed(seed)
    num_keys = num_before + num_tokens
    qkv = (size * torch.randn(num_tokens, kv_heads * (group + 2), head_dim)).bfloat16()
    kv = torch.randn(2, kv_heads, num_keys + num_after, head_dim).bfloat16()
    kv[:, :, num_keys:] = torch.nan
    q = qkv[:, : kv_heads * group]
    attention = PromptAttention(kernels)
    assert attention.takes(q, num_keys)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, lse = attention.run(q, kv, num_keys, with_lse=True)
    finally:
        torch.set_num_threads(before)
    want, want_lse = expected(q, kv, num_keys)
    assert lse is not None
    assert (out.double() - want).abs().max() <= TOLERANCE * want.abs().max()
    assert torch.allclose(lse.double(), want_lse, rtol=1e-5, atol=1e-4)


def test_a_model_uses_the_kernel_for_its_prompts(
    tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts run at once, in chunks, and after a prefix that two contexts share."""
    overrides = {"head_dim": 64, "max_position_embeddings": 1024}
    path = make_tiny_model(tmp_path / "model", "llama", overrides=overrides)
    checkpoint, cpu = open_checkpoint(str(path)), torch.device("cpu")
    sizes: list[tuple[int, int, bool]] = []
    run = PromptAttention.run

    def recording(
        self: PromptAttention, q: torch.Tensor, kv: torch.Tensor, keys: int, **rest: bool
    ):  # type: ignore[no-untyped-def]
        sizes.append((len(q), keys, rest["with_lse"]))
        return run(self, q, kv, keys, **rest)

    monkeypatch.setattr(PromptAttention, "run", recording)

    def logits(dtype: torch.dtype, make_layers: MakeLayers | None) -> torch.Tensor:
        model = load_decoder(checkpoint, dtype, cpu)
        runner = ModelRunner(
            model, 128, 16, CpuOptions(gate=cpu_gate(dtype)), make_layers=make_layers
        )
        found: list[torch.Tensor] = []
        made = model.logits
        model.logits = lambda hidden: found.append(made(hidden)) or found[-1]  # type: ignore[func-returns-value, method-assign]
        driver = Driver(runner)
        tokens = [n * n % 97 for n in range(700)]
        for chunk in (None, 151):
            parent = driver.context(tokens[:301])
            driver.generate([parent, driver.context(tokens[5:8])], 1, chunk)
        forks = [driver.fork(parent, 300) for _ in range(2)]
        for fork, start in zip(forks, (300, 400), strict=True):
            fork.tokens += tokens[start : start + 201]
        driver.generate(forks, 1)
        return torch.cat(found).float()

    exact = logits(torch.float32, None)
    assert sizes == []
    torch_error = (logits(torch.bfloat16, None) - exact).abs().max()
    assert sizes == []
    future: Future[Kernels] = Future()
    future.set_result(kernels)
    error = (logits(torch.bfloat16, partial(CompiledLayers, future)) - exact).abs().max()
    assert {(301, 301), (151, 151), (150, 301)} <= {size[:2] for size in sizes}
    assert error <= 1.5 * torch_error


def test_unsupported_shapes_and_types_are_refused(kernels: Kernels) -> None:
    attention = PromptAttention(kernels)
    q = torch.zeros(6, 2, 64, dtype=torch.bfloat16)
    assert attention.takes(q, 6)
    for other in (q.float(), q[:5], q[..., :32], torch.zeros(6, 2, 96, dtype=torch.bfloat16)):
        assert not attention.takes(other, 6)
    assert not attention.takes(q, 1 << 20)
    assert not PromptAttention(replace(kernels, attend_prompt=None)).takes(q, 6)
