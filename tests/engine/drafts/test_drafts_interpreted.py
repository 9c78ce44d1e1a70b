"""The CUDA runner in Triton's interpreter verifies drafts without a change of outputs."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.core.output import Language
from parrot.engine.grammar.compiler import GrammarCompiler
from parrot.engine.models import decoder
from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.layers import PlainLinear
from parrot.engine.runner.cuda import CudaOptions, CudaRunner
from parrot.protocol.sampling import SamplingConfig
from tests.support.byte_tokenizer import plain_byte_tokenizer
from tests.support.drafted import assert_drafts_change_nothing
from tests.support.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device"),
    pytest.mark.timeout(300),
]

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
# Tokens that repeat.
FEW = {7: 50.0, 8: 49.3, 9: 48.9}
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0, "frequency_penalty": 1.0, "logit_bias": FEW},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 1.5, "seed": 4, "regex": "([a-m][A-M]|[n-z][N-Z])+"},
]


@pytest.fixture(scope="module")
def make_runner(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], CudaRunner]:
    path: Path = make_tiny_model(tmp_path_factory.mktemp("model"), "llama", overrides=SMALL)
    checkpoint = open_checkpoint(str(path))
    with pytest.MonkeyPatch.context() as patch:  # The kernels read plain weights.
        patch.setattr(decoder, "make_linear", PlainLinear)
        model = Decoder(checkpoint.spec, checkpoint.take, torch.float32, torch.device("cpu"))

    def make(overlap: bool) -> CudaRunner:
        options = CudaOptions(
            max_rows=16, max_tokens=64, use_graphs=False, upcast=True, overlap=overlap
        )
        return CudaRunner(model, 32, 16, options)

    return make


@pytest.mark.parametrize("overlap", [True, False])
def test_outputs_are_the_same_with_drafts(
    make_runner: Callable[[bool], CudaRunner], overlap: bool
) -> None:
    """All kinds run in one batch, because a step's time hardly depends on the batch here."""
    tokenizer = plain_byte_tokenizer(259)
    language = Language.of(tokenizer, GrammarCompiler.of(tokenizer, 259))
    numbers = random.Random(1)
    prompts = [[numbers.randrange(97, 122) for _ in range(length)] for length in (5, 20, 9)]
    shared = {"max_gen_length": 8, "ignore_tokenizer_eos": True}
    samplings = [SamplingConfig(**fields, **shared) for fields in SAMPLINGS]
    drafted = assert_drafts_change_nothing(make_runner(overlap), language, prompts, samplings)
    for output in drafted:
        assert output.response.usage.accepted_tokens > 2
