"""Log probabilities of prompts (`echo`) by the real embedded model equal those of transformers.
Evaluation harnesses use them."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers

from parrot.cluster import Cluster
from tests.support.embedded_folder import write_embedded_folder
from tests.support.plain_sampling import PLAIN_SAMPLING

TEXTS = [
    "A parrot is a bird.",
    "x",
    "Straße, 猫 and 🦜: <|im_start|>user\n",
    "The lamp was lit. " * 30,
]
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = write_embedded_folder(tmp_path_factory.mktemp("model") / "embedded")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    engine = {"model": "embedded", "dtype": "float32", "fill_chunk_size": 100} | PLAIN_SAMPLING
    with Cluster(engines=[engine]) as running:
        yield running


def assert_as_the_reference(reference: tuple[Any, Any], ids: list[int], found: Any) -> None:
    """Compare the log probabilities of each token but the first, and of the most likely token."""
    model, _ = reference
    with torch.inference_mode():
        table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    want = table[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    assert len(found.tokens) == len(found.text_offset) == len(ids)
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    np.testing.assert_allclose(found.token_logprobs[1:], want, atol=TOLERANCE)
    best = [max(likely.values()) for likely in found.top_logprobs[1:]]
    np.testing.assert_allclose(best, table[:-1].amax(-1), atol=TOLERANCE)


async def test_log_probabilities_equal_those_of_transformers(
    openai_client: openai.AsyncOpenAI, reference: tuple[Any, Any]
) -> None:
    """Prompts are texts or token ids. They are scored in chunks while another answer is
    generated."""
    ids = [reference[1](text, add_special_tokens=False).input_ids for text in TEXTS]
    messages: list[Any] = [{"role": "user", "content": "Count to twenty."}]
    answering = asyncio.ensure_future(
        openai_client.chat.completions.create(
            model="embedded", messages=messages, max_tokens=60, temperature=0
        )
    )
    wanted: dict[str, Any] = {"model": "embedded", "echo": True, "max_tokens": 0, "logprobs": 2}
    together = await openai_client.completions.create(prompt=TEXTS, **wanted)
    by_ids = await openai_client.completions.create(prompt=ids, **wanted)
    assert (await answering).choices[0].message.content
    for answer in (together, by_ids):
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        for choice, text, tokens in zip(answer.choices, TEXTS, ids, strict=True):
            assert choice.text == text
            assert_as_the_reference(reference, tokens, choice.logprobs)
            offsets = choice.logprobs.text_offset
            assert offsets == sorted(offsets)


async def test_one_token_after_each_prompt(
    openai_client: openai.AsyncOpenAI, reference: tuple[Any, Any]
) -> None:
    """What lm-evaluation-harness sends to servers that generate at least one token, and how it
    reads the answer."""
    model, tokenizer = reference
    pairs = [("A parrot is a", " bird."), ("One, two, three,", " four, five"), ("The sky", " is")]
    encoded = [tokenizer(a, add_special_tokens=False).input_ids for a, _ in pairs]
    whole = [
        first + tokenizer(b, add_special_tokens=False).input_ids
        for first, (_, b) in zip(encoded, pairs, strict=True)
    ]
    answer = await openai_client.completions.create(
        model="embedded",
        prompt=whole,
        max_tokens=1,
        logprobs=1,
        echo=True,
        temperature=0,
        seed=1234,
    )
    for choice, ids, first in zip(answer.choices, whole, encoded, strict=True):
        logprobs: Any = choice.logprobs
        assert len(logprobs.tokens) == len(ids) + 1
        found = sum(logprobs.token_logprobs[len(first) : -1])
        with torch.inference_mode():
            table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        rest = ids[len(first) :]
        want = table[len(first) - 1 : -1].gather(1, torch.tensor(rest)[:, None])
        assert found == pytest.approx(float(want.sum()), abs=TOLERANCE * len(rest))
        pairs_found = zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
        greedy = [own == max(top.values()) for own, top in list(pairs_found)[len(first) : -1]]
        assert greedy == (table[len(first) - 1 : -1].argmax(-1) == torch.tensor(rest)).tolist()
