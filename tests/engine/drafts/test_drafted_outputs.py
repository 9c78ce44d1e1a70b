"""Outputs of the embedded model are the same with drafts, of any kind, and without."""

from functools import cache
from typing import Any

import pytest
import torch

from parrot.engine.core.output import Language
from parrot.engine.grammar.compiler import GrammarCompiler
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.runner.cpu import ModelRunner
from parrot.protocol.sampling import SamplingConfig
from tests.support.drafted import assert_drafts_change_nothing

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
def runner() -> ModelRunner:
    model = load_decoder(open_checkpoint("embedded"), torch.float32, torch.device("cpu"))
    return ModelRunner(model, 128, 16)


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_outputs_are_the_same_with_drafts(kind: str) -> None:
    tokenizer = open_checkpoint("embedded").load_tokenizer()
    grammars = GrammarCompiler.of(tokenizer, runner().info.vocab_size)
    language = Language.of(tokenizer, grammars)
    prompts = [language.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    sampling = SamplingConfig(**{"max_gen_length": 40, **SAMPLINGS[kind]})
    samplings = [sampling] * len(prompts)
    drafted = assert_drafts_change_nothing(runner(), language, prompts, samplings)
    if kind != "stopped":
        assert sum(o.response.usage.accepted_tokens for o in drafted) > 5
