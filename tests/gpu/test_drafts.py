"""Drafts are verified on the device, in graphs. Outputs equal those without drafts."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.core.output import Language
from parrot.engine.grammar.compiler import GrammarCompiler
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.runner.cuda import CudaOptions, CudaRunner
from parrot.protocol.sampling import SamplingConfig
from tests.support.byte_tokenizer import plain_byte_tokenizer
from tests.support.drafted import assert_drafts_change_nothing
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

FEW = {7: 50.0, 8: 49.3, 9: 48.9}  # Tokens that repeat often.
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 1.0, "logit_bias": FEW},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 1.5, "seed": 4, "top_k": 5},
    {"temperature": 1.5, "seed": 4, "regex": "([a-m][A-M]|[n-z][N-Z])+"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama", overrides=sizes)


@pytest.fixture(scope="module", params=[True, False], ids=["graphs", "kernels"])
def runner(folder: Path, request: pytest.FixtureRequest) -> CudaRunner:
    model = load_decoder(open_checkpoint(str(folder)), torch.float32, torch.device("cuda"))
    runner = CudaRunner(model, 128, 64, CudaOptions(max_rows=64, use_graphs=request.param))
    runner.warm_up()
    return runner


@pytest.mark.parametrize("fields", SAMPLINGS, ids=str)
def test_outputs_are_the_same_with_drafts(runner: CudaRunner, fields: dict[str, Any]) -> None:
    tokenizer = plain_byte_tokenizer(259)
    language = Language.of(tokenizer, GrammarCompiler.of(tokenizer, 259))
    numbers = random.Random(1)
    prompts = [[numbers.randrange(97, 122) for _ in range(n)] for n in (5, 70, 130, 20)]
    sampling = SamplingConfig(**fields, max_gen_length=60, ignore_tokenizer_eos=True)
    samplings = [sampling] * len(prompts)
    drafted = assert_drafts_change_nothing(runner, language, prompts, samplings)
    assert sum(o.response.usage.accepted_tokens for o in drafted) > 60
    if runner.computer.graphs is not None:
        assert runner.computer.graphs.num_replays > 30
