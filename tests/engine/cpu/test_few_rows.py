"""Steps of few rows in compiled kernels give the results of torch, for every supported family."""

from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from parrot.engine.cpu.forward import MAX_ROWS, CompiledLayers, FewRowsDecoder, fits
from parrot.engine.cpu.native import Kernels, load
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.models.decoder import Decoder
from parrot.engine.runner.cpu import CpuOptions, ModelRunner
from tests.support.runner_driver import Driver
from tests.support.tiny_model import make_tiny_model

pytest.importorskip("numba")

CPU = torch.device("cpu")
BIAS = {"attention_bias": True, "mlp_bias": True}


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return load("float32")


@pytest.fixture
def num_few(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each step that ran in compiled kernels."""
    found: list[int] = []
    forward = FewRowsDecoder.forward

    def recording(self: FewRowsDecoder, token_ids: torch.Tensor, step: Any) -> torch.Tensor:
        found.append(len(token_ids))
        return forward(self, token_ids, step)

    monkeypatch.setattr(FewRowsDecoder, "forward", recording)
    return found


def tiny(folder: Path, family: str, **overrides: Any) -> Decoder:
    path = make_tiny_model(folder / "model", family, overrides={"head_dim": 32} | overrides)
    return load_decoder(open_checkpoint(str(path)), torch.float32, CPU)


def ready(kernels: Kernels) -> "Future[Kernels]":
    future: Future[Kernels] = Future()
    future.set_result(kernels)
    return future


def tokens_and_logits(
    runner: ModelRunner, chunks: list[int]
) -> tuple[list[list[int]], torch.Tensor]:
    """The generated tokens, and the logits of each step."""
    states: list[torch.Tensor] = []
    logits = runner._model.logits

    def recording(hidden: torch.Tensor) -> torch.Tensor:
        states.append(logits(hidden))
        return states[-1]

    runner._model.logits = recording  # type: ignore[method-assign]
    driver = Driver(runner)
    tokens = []
    for chunk in chunks:
        tokens += driver.generate([driver.context(list(range(30)))], 6, chunk)
    tokens += driver.generate([driver.context([7] * 40), driver.context([1, 2, 3])], 5)
    runner._model.logits = logits  # type: ignore[method-assign]
    return tokens, torch.cat(states)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", BIAS | {"num_key_value_heads": 6}),
        ("llama", {"num_key_value_heads": 1, "hidden_size": 96}),
        ("mistral", {}),
        ("qwen2", {"head_dim": None, "hidden_size": 128}),
        ("qwen3", {}),
    ],
)
def test_families(
    tmp_path: Path,
    kernels: Kernels,
    num_few: list[int],
    family: str,
    overrides: dict[str, Any],
) -> None:
    """Prompts at once and in chunks, and decodes. Tokens are equal to torch's, and logits are
    close."""
    model = tiny(tmp_path, family, **overrides)
    want = tokens_and_logits(ModelRunner(model, 64, 4), [64, 3])
    assert num_few == []
    got = tokens_and_logits(
        ModelRunner(model, 64, 4, make_layers=partial(CompiledLayers, ready(kernels))), [64, 3]
    )
    assert {1, 2, 3, 30, 43} <= set(num_few)
    assert got[0] == want[0]
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=2e-4)


def test_kernels_are_used_as_soon_as_they_are_compiled(
    tmp_path: Path, kernels: Kernels, num_few: list[int]
) -> None:
    """They are not used for steps of many rows, or if they could not be compiled."""
    model = tiny(tmp_path, "llama")
    waiting: Future[Kernels] = Future()
    driver = Driver(ModelRunner(model, 64, 4, make_layers=partial(CompiledLayers, waiting)))
    context = driver.context(list(range(MAX_ROWS + 1)))
    want = driver.generate([driver.context(context.tokens)], 9)
    output = driver.generate([context], 4)
    assert num_few == []
    waiting.set_result(kernels)
    output[0] += driver.generate([context], 5)[0]
    assert num_few == [1] * 5
    assert output == want
    driver.generate([driver.context(context.tokens[: MAX_ROWS + 1])], 1)
    assert num_few == [1] * 5
    failed: Future[Kernels] = Future()
    failed.set_exception(RuntimeError("no compiler"))
    driver = Driver(ModelRunner(model, 64, 4, make_layers=partial(CompiledLayers, failed)))
    assert driver.generate([driver.context(context.tokens[: MAX_ROWS + 1])], 9) == want
    assert num_few == [1] * 5


def test_unsupported_models_run_without_compiled_kernels(tmp_path: Path) -> None:
    for family, overrides in (
        ("opt", {}),
        ("llama", {"head_dim": 16}),
        ("llama", {"intermediate_size": 72}),
    ):
        model = tiny(tmp_path / str(overrides), family, **overrides)
        assert not fits(model, ModelRunner(model, 4, 4)._cache.pooled)
    model = tiny(tmp_path, "llama")
    assert not fits(model, ModelRunner(model, 4, 4, CpuOptions(quantised=True))._cache.pooled)
    assert fits(model, ModelRunner(model, 4, 4)._cache.pooled)
