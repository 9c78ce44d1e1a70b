"""After warm-up, no request waits for the compilation of a kernel."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
import triton

from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.models.packed import Weights
from parrot.engine.runner.cuda import CudaOptions, CudaRunner
from parrot.protocol.sampling import ResolvedSampling
from tests.support.four_bit_checkpoints import quantise_folder
from tests.support.runner_driver import Context, Driver
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SIZES = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 2048,
    "max_position_embeddings": 16384,
}
SAMPLINGS = [
    ResolvedSampling(temperature=0),
    ResolvedSampling(temperature=0.8),
    ResolvedSampling(top_p=0.9),
    ResolvedSampling(top_k=20, min_p=0.1),
    ResolvedSampling(presence_penalty=0.5),
]


@pytest.mark.parametrize(
    ("kv_heads", "quantised", "four_bits"),
    [(4, False, False), (16, False, False), (4, True, False), (4, False, True)],
)
def test_nothing_is_compiled_after_warm_up(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kv_heads: int,
    quantised: bool,
    four_bits: bool,
) -> None:
    """Prompts of any length run alone, together, and in steps with decodes. Contexts fork, and all
    kinds of sampling are used."""
    sizes = SIZES | {"num_key_value_heads": kv_heads}
    folder = make_tiny_model(tmp_path / "plain", overrides=sizes)
    if four_bits:
        quantise_folder(folder, tmp_path / "four bits", "awq", 64)
        folder = tmp_path / "four bits"
    checkpoint, device = open_checkpoint(str(folder)), torch.device("cuda")
    model = load_decoder(checkpoint, torch.bfloat16, device, weights=Weights.KEPT)
    runner = CudaRunner(
        model, 4000, 64, CudaOptions(max_rows=64, max_tokens=8192, quantised=quantised)
    )
    runner.warm_up()
    compiled: list[str] = []

    def note(**details: Any) -> None:
        compiled.append(details["repr"])

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    rng, driver = random.Random(0), Driver(runner)

    def fresh(length: int) -> Context:
        return driver.context([rng.randrange(250) for _ in range(length)])

    for length in (1, 2, 3, 15, 16, 17, 64, 100, 1000, 2047, 2048, 4096, 5000, 8192, 9000):
        driver.generate([fresh(length)], 3, chunk=min(length, 8000))
    for count in (1, 2, 5, 8, 9, 16, 31, 32, 33, 48, 64):
        even, uneven = [300] * count, [rng.randint(1, 3000) for _ in range(count)]
        for lengths in (even, uneven):
            contexts = [fresh(length) for length in lengths]
            driver.generate(contexts, 12, chunk=100)
            parents = contexts[: 1 + count // 8]
            children = [driver.fork(rng.choice(parents), rng.randint(1, 64)) for _ in contexts]
            for child in children:
                child.tokens.append(7)
            driver.generate(children, 3)
            for sampling in SAMPLINGS:
                for context in contexts:
                    context.tokens.append(7)
                driver.step([(context, 1) for context in contexts], sampling)
            contexts[0].tokens += [7] * 400
            driver.step([(context, context.wanted) for context in contexts if context.wanted])
            driver = Driver(runner)
    assert compiled == []
