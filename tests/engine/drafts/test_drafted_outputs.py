"""Outputs of the embedded model are the same with and without drafts of all kinds."""

from collections import Counter
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
    "schema": {"temperature": 0, "json_schema": PEOPLE, "max_gen_length": 24},
}


def test_outputs_are_the_same_with_drafts() -> None:
    """All kinds run in one batch, because its steps take little longer than steps with one kind."""
    tokenizer = open_checkpoint("embedded").load_tokenizer()
    model = load_decoder(open_checkpoint("embedded"), torch.float32, torch.device("cpu"))
    runner = ModelRunner(model, 128, 16)
    language = Language.of(tokenizer, GrammarCompiler.of(tokenizer, runner.info.vocab_size))
    encoded = [language.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    kinds = ["greedy", *SAMPLINGS]
    samplings = [SamplingConfig(**{"max_gen_length": 16, **SAMPLINGS[kind]}) for kind in kinds]
    prompts = [encoded[number % 2] for number in range(len(kinds))]
    accepted: Counter[str] = Counter()
    drafted = assert_drafts_change_nothing(runner, language, prompts, samplings)
    for kind, output in zip(kinds, drafted, strict=True):
        accepted[kind] += output.response.usage.accepted_tokens
    assert all(accepted[kind] > 5 for kind in SAMPLINGS if kind != "stopped"), accepted
