"""Long prompts, with compiled kernels between the matrix products, give the logits of torch for
each supported family."""

from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from parrot.engine.cpu.forward import MAX_ROWS, CompiledLayers, ManyRowsDecoder
from parrot.engine.cpu.native import Kernels, load
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.models.decoder import Decoder
from parrot.engine.runner.cpu import MakeLayers, ModelRunner
from tests.support.runner_driver import Driver
from tests.support.tiny_model import make_tiny_model

pytest.importorskip("numba")


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return load("float32")


def tiny(folder: Path, family: str, **overrides: Any) -> Decoder:
    path = make_tiny_model(folder / "model", family, overrides={"head_dim": 32} | overrides)
    return load_decoder(open_checkpoint(str(path)), torch.float32, torch.device("cpu"))


def prompt_logits(model: Decoder, kernels: Kernels | None) -> torch.Tensor:
    """Logits at the ends of two prompts in one step, and of a prompt in chunks."""
    found: list[torch.Tensor] = []
    logits = model.logits

    def recording(hidden: torch.Tensor) -> torch.Tensor:
        found.append(logits(hidden))
        return found[-1]

    make_layers: MakeLayers | None = None
    if kernels is not None:
        future: Future[Kernels] = Future()
        future.set_result(kernels)
        make_layers = partial(CompiledLayers, future)
    model.logits = recording  # type: ignore[method-assign]
    driver = Driver(ModelRunner(model, 128, 4, make_layers=make_layers))
    tokens = [n * n % 97 for n in range(MAX_ROWS + 40)]
    driver.generate([driver.context(tokens), driver.context(tokens[7:])], 1)
    driver.generate([driver.context(tokens)], 1, MAX_ROWS + 1)
    model.logits = logits  # type: ignore[method-assign]
    return torch.cat(found)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 1, "hidden_size": 96}),
        ("qwen2", {"head_dim": None, "hidden_size": 128}),
        ("qwen3", {}),
    ],
)
def test_families(
    tmp_path: Path,
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    overrides: dict[str, Any],
    threads: int,
) -> None:
    sizes: list[int] = []
    forward = ManyRowsDecoder.forward

    def recording(self: ManyRowsDecoder, token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(token_ids))
        return forward(self, token_ids, *rest)

    monkeypatch.setattr(ManyRowsDecoder, "forward", recording)
    model = tiny(tmp_path, family, **overrides)
    want = prompt_logits(model, None)
    assert sizes == []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = prompt_logits(model, kernels)
    finally:
        torch.set_num_threads(before)
    assert sizes == [2 * MAX_ROWS + 73, MAX_ROWS + 1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-4)
