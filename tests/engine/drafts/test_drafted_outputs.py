"""Outputs of the embedded model are the same with drafts, of any kind, and without."""

import asyncio
import random
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.core.driver import deliver
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Piece
from parrot.engine.core.output import Language
from parrot.engine.grammar.compiler import GrammarCompiler
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.runner.cpu import ModelRunner
from parrot.protocol.engine_api import DraftSources, GenerateResponse, StreamChunk
from parrot.protocol.sampling import SamplingConfig
from parrot.utils.clock import MonotonicClock

pytestmark = pytest.mark.timeout(300)

CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul("
PROMPTS = ["List the numbers: 1, 2, 3, 4, 5, 6,", CODE]
PEOPLE = {
    "type": "array",
    "minItems": 2,
    "maxItems": 2,
    "items": {
        "type": "object",
        "properties": {"favourite_colour": {"enum": ["red", "blue"]}, "age": {"type": "integer"}},
        "required": ["favourite_colour", "age"],
        "additionalProperties": False,
    },
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.7, "seed": 5, "top_p": 0.95},
    "penalized": {"temperature": 0, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "repetition": {"temperature": 0.5, "seed": 2, "repetition_penalty": 1.1},
    "biased": {"temperature": 0, "logit_bias": {28: -2.0, 198: 1.5}},
    "stopped": {"temperature": 0, "stop_str": ["1", "b\n"]},
    "schema": {"temperature": 0, "json_schema": PEOPLE, "max_gen_length": 60},
}


@cache
def language() -> Language:
    tokenizer = open_checkpoint("embedded").load_tokenizer()
    return Language.of(tokenizer, GrammarCompiler.of(tokenizer, runner().info.vocab_size))


@cache
def runner() -> ModelRunner:
    model = load_decoder(open_checkpoint("embedded"), torch.float32, torch.device("cpu"))
    return ModelRunner(model, 128, 16)


def answers(
    sampling: SamplingConfig, max_draft_tokens: int, texts: Sequence[Sequence[int]] = ((), ())
) -> tuple[list[GenerateResponse], list[str]]:
    """The responses, and the texts that were streamed; a draft's text for each prompt."""
    config = BuiltinConfig(model="embedded", scheduler={"max_draft_tokens": max_draft_tokens})
    core = EngineCore(config, runner(), language(), MonotonicClock())
    outcomes: list[list[Any]] = [[] for _ in PROMPTS]
    grammars = language().grammars
    assert grammars is not None
    for i, prompt in enumerate(PROMPTS):
        ids = array("i", language().tokenizer.encode(prompt).ids)
        wanted = EngineRequest(
            i,
            (Piece(i, ids),),
            sampling=sampling,
            stream=True,
            constraint=asyncio.run(grammars.constraint(sampling)),
            drafts=DraftSources(texts=(list(texts[i]),)),
        )
        core.requests.submit(wanted, outcomes[i].append)
    while core.step():
        deliver(core.requests.outbox.take())
        core.check_integrity()
    streamed = ["".join(c.text for c in o if isinstance(c, StreamChunk)) for o in outcomes]
    return [outcome[-1] for outcome in outcomes], streamed


def edited(ids: Sequence[int]) -> list[int]:
    """Some tokens left out, some other ones put in."""
    numbers = random.Random(len(ids))
    kept = [i for i in ids if numbers.random() > 0.1]
    for _ in range(len(ids) // 12):
        kept.insert(numbers.randrange(len(kept) + 1), numbers.randrange(1000))
    return kept


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_outputs_are_the_same_with_drafts(kind: str) -> None:
    sampling = SamplingConfig(**{"max_gen_length": 40, **SAMPLINGS[kind]})
    plain, streamed = answers(sampling, 0)
    assert all(answer.usage.drafted_tokens == 0 for answer in plain)
    for texts in ([a.generated_ids for a in plain], [edited(a.generated_ids) for a in plain]):
        drafted, drafted_stream = answers(sampling, 16, texts)
        assert drafted_stream == streamed
        for with_drafts, without in zip(drafted, plain, strict=True):
            assert with_drafts.generated_ids == without.generated_ids
            assert with_drafts.generated_text == without.generated_text
            assert with_drafts.finish_reason is without.finish_reason
            usage = with_drafts.usage
            assert usage.accepted_tokens <= min(usage.drafted_tokens, usage.output_tokens)
        if kind != "stopped":
            assert sum(a.usage.accepted_tokens for a in drafted) > 5
