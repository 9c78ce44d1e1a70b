"""Log probabilities equal transformers', however tokens are chosen and split into steps."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Piece
from parrot.engine.core.output import Language
from parrot.engine.core.steps import SampleSpec
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.runner.cpu import ModelRunner
from parrot.engine.runner.log_probabilities import score_tokens, scores_of
from parrot.engine.runner.sampling import sample
from parrot.protocol.engine_api import GenerateResponse
from parrot.protocol.sampling import ResolvedSampling
from parrot.utils.clock import MonotonicClock
from tests.support.answer import Answer
from tests.support.byte_tokenizer import plain_byte_tokenizer
from tests.support.tiny_model import make_tiny_model

CHANGED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 0.5, "logit_bias": {3: 40.0}, "presence_penalty": 2.0},
    {"temperature": 1.0, "repetition_penalty": 3.0, "top_p": 0.5},
]


@given(st.integers(1, 70), st.integers(0, 20), st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_rows_are_looked_up_in_the_softmax(num_rows: int, num_top: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 8 * torch.randn(num_rows, 97, generator=generator)
    tokens = torch.randint(97, (num_rows,), generator=generator)
    specs = [
        SampleSpec(100 + row, ResolvedSampling(logprobs=min(num_top, row)), 0, 0)
        for row in range(num_rows)
    ]
    found = scores_of(specs, score_tokens(logits, tokens, num_top).numpy())
    want = torch.log_softmax(logits.double(), dim=-1)
    for row, spec in enumerate(specs):
        ids, values = found[spec.job_id]
        assert len(ids) == len(values) == 1 + min(num_top, row)
        assert ids[0] == tokens[row]
        likely = want[row].sort(descending=True).values[: len(ids) - 1].tolist()
        assert values == pytest.approx([float(want[row][ids[0]]), *likely], abs=1e-5)
        assert values[1:] == pytest.approx(want[row][list(ids[1:])].tolist(), abs=1e-5)


def test_sampling_settings_do_not_change_log_probabilities() -> None:
    logits = 4 * torch.randn(5, 60, generator=torch.Generator().manual_seed(0))
    want = torch.log_softmax(logits, dim=-1)
    specs = [
        SampleSpec(i, ResolvedSampling(logprobs=2, **fields), i, 9, [3, 5], [1, 3, 5])
        for i, fields in enumerate(CHANGED)
    ]
    specs.append(SampleSpec(4, ResolvedSampling(), 4, 9))
    result = sample(logits.clone(), specs)
    assert result.scores.keys() == {0, 1, 2, 3}
    for row in range(4):
        ids, values = result.scores[row]
        assert ids[0] == result.tokens[row]
        assert list(ids[1:]) == want[row].topk(2).indices.tolist()
        assert values == pytest.approx(want[row][list(ids)].tolist(), abs=1e-5)
    assert result.scores[2].ids[0] == 3


def test_a_row_that_is_not_finite_does_not_affect_the_others() -> None:
    logits = torch.randn(3, 40)
    logits[1, 7] = float("nan")
    specs = [SampleSpec(i, ResolvedSampling(temperature=0, logprobs=1), 0, 0) for i in range(3)]
    result = sample(logits, specs)
    assert result.errors.keys() == {1}
    assert result.scores[0].ids[0] == result.scores[0].ids[1] == result.tokens[0]
    assert result.scores[2].values[0] == result.scores[2].values[1]


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_batch_under_the_engine_core(tmp_path: Path, family: str, chunk: int | None) -> None:
    """Prompts of different lengths, in chunks and in steps with other tokens. One request wants no
    log probabilities, one forks a context, and the pool is so small that contexts are preempted."""
    path = make_tiny_model(tmp_path / family, family)
    model = load_decoder(open_checkpoint(str(path)), torch.float32, torch.device("cpu"))
    language = Language.of(plain_byte_tokenizer(259))
    config = BuiltinConfig(fill_chunk_size=chunk)
    core = EngineCore(config, ModelRunner(model, 12, 8), language, MonotonicClock())
    prompts = [list(range(10 + i, 20 + 3 * i)) for i in range(6)]
    answers: list[Answer] = []
    for i, prompt in enumerate(prompts):
        fields: dict[str, Any] = CHANGED[i % len(CHANGED)] | {"max_gen_length": 7, "seed": i}
        if i != 3:
            fields["logprobs"] = i
        sampling = ResolvedSampling(ignore_tokenizer_eos=True, **fields)
        pieces = (Piece(i, array("i", prompt)),)
        if i == 5:
            pieces = (Piece(50, array("i", prompt[:9])), Piece(5, array("i", prompt[9:]), 50))
        answers.append(Answer())
        core.requests.submit(EngineRequest(i, pieces, sampling=sampling), answers[-1])
    while core.has_work and core.step():
        core.check_integrity()
    for call, argument in core.requests.outbox.take():
        call(argument)
    twin = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        response = answer.response
        assert isinstance(response, GenerateResponse)
        if i == 3:
            assert response.logprobs is None
            continue
        found = response.logprobs
        assert found is not None
        assert (len(found), found.width) == (7, 1 + i)
        assert list(found.ids[:: found.width]) == response.generated_ids
        with torch.inference_mode():
            logits = twin(torch.tensor([prompt + response.generated_ids])).logits[0].float()
        want = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        ids = torch.tensor(found.ids).view(7, -1).long()
        assert list(found.values) == pytest.approx(want.gather(1, ids).view(-1).tolist(), abs=1e-4)
        likely = want.topk(i, dim=-1).values
        assert torch.allclose(want.gather(1, ids[:, 1:]), likely, atol=1e-4)
