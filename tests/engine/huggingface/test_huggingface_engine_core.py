"""The huggingface engine's runner in the engine core: outputs of whole requests are exact."""

from array import array
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from parrot.engine.config import HuggingFaceConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Outcome, Piece
from parrot.engine.core.output import Language
from parrot.engine.huggingface import HuggingFaceRunner
from parrot.protocol.engine_api import FillResponse, GenerateResponse, SpecialIds, StreamChunk
from parrot.protocol.errors import ParrotError, PromptTooLong
from parrot.protocol.sampling import SamplingConfig
from tests.support.byte_tokenizer import plain_byte_tokenizer
from tests.support.manual_clock import ManualClock

NUM_TOKENS = 8
GREEDY = SamplingConfig(temperature=0, max_gen_length=NUM_TOKENS, ignore_tokenizer_eos=True)
PROMPTS = [[(31 * i + 7 * j) % 250 for j in range(3 + 5 * i)] for i in range(6)]


@cache
def tiny_model() -> Any:
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=128,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    return model


def expected(prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    output = tiny_model().generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


class Answer:
    """A sink that keeps all chunks and the outcome."""

    def __init__(self) -> None:
        self.chunks: list[StreamChunk] = []
        self.response: GenerateResponse | FillResponse | None = None
        self.error: ParrotError | None = None

    def __call__(self, outcome: Outcome) -> None:
        if isinstance(outcome, StreamChunk):
            self.chunks.append(outcome)
        elif isinstance(outcome, ParrotError):
            self.error = outcome
        else:
            self.response = outcome

    @property
    def ids(self) -> list[int]:
        assert isinstance(self.response, GenerateResponse), self.error
        return self.response.generated_ids


class Harness:
    def __init__(self, *, num_blocks: int = 64, **config: Any) -> None:
        runner = HuggingFaceRunner(
            tiny_model(), num_blocks=num_blocks, block_size=4, max_seq_len=128
        )
        response = plain_byte_tokenizer(256).model_copy(update={"special_ids": SpecialIds()})
        language = Language.of(response)
        self.core = EngineCore(
            HuggingFaceConfig.model_validate(config), runner, language, ManualClock()
        )
        self._num_requests = 0

    def ask(
        self, *pieces: Piece, sampling: SamplingConfig = GREEDY, stream: bool = False
    ) -> Answer:
        answer = Answer()
        self._num_requests += 1
        self.core.requests.submit(
            EngineRequest(self._num_requests, pieces, 0, sampling, stream), answer
        )
        return answer

    def run(self) -> int:
        """Run steps until no work is left. Returns their number."""
        num_steps = 0
        while self.core.has_work and self.core.step():
            num_steps += 1
            self._deliver()
        self._deliver()
        self.core.check_integrity()
        return num_steps

    def _deliver(self) -> None:
        for call, argument in self.core.requests.outbox.take():
            call(argument)


def piece(context_id: int, ids: list[int], parent: int = -1, length: int | None = None) -> Piece:
    return Piece(context_id, array("i", ids), parent, length)


@pytest.mark.parametrize("config", [{}, {"fill_chunk_size": 7}, {"num_blocks": 10}])
def test_a_batch_is_exact_also_in_chunks_and_after_preemption(config: dict[str, Any]) -> None:
    harness = Harness(**config)
    answers = [harness.ask(piece(i, prompt)) for i, prompt in enumerate(PROMPTS)]
    harness.run()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.ids == expected(prompt)
    harness.core.requests.free(range(len(PROMPTS)))
    assert harness.core.runtime_info().num_cached_tokens == 0


def test_forks_of_a_shared_prefix_compute_only_their_own_tokens() -> None:
    harness = Harness()
    prefix = PROMPTS[4]
    first = harness.ask(piece(1, prefix), piece(2, [9, 8], 1, len(prefix)))
    second = harness.ask(piece(3, [7, 6, 5], 1, len(prefix)))
    harness.run()
    third = harness.ask(piece(4, [1], 2, len(prefix) + 5))
    harness.run()
    assert first.ids == expected([*prefix, 9, 8])
    assert second.ids == expected([*prefix, 7, 6, 5])
    assert third.ids == expected([*prefix, 9, 8, *first.ids[:3], 1])
    assert isinstance(second.response, GenerateResponse)
    assert second.response.usage.cached_tokens == len(prefix)
    assert second.response.usage.computed_tokens == 3


def test_streams_have_the_same_text_and_end_at_stop_strings() -> None:
    harness = Harness()
    whole = harness.ask(piece(1, PROMPTS[1]))
    streamed = harness.ask(piece(2, PROMPTS[1]), stream=True)
    harness.run()
    assert isinstance(whole.response, GenerateResponse)
    text = whole.response.generated_text
    assert [i for chunk in streamed.chunks for i in chunk.ids] == whole.ids
    assert "".join(chunk.text for chunk in streamed.chunks) == text
    stop = text[2:5]
    stopped = harness.ask(
        piece(3, PROMPTS[1]), sampling=GREEDY.model_copy(update={"stop_str": stop}), stream=True
    )
    harness.run()
    assert isinstance(stopped.response, GenerateResponse)
    assert stopped.response.generated_text == text[: text.index(stop)]


def test_aborted_and_too_long_requests_do_not_affect_the_others() -> None:
    harness = Harness()
    aborted = harness.ask(piece(1, PROMPTS[2]))
    kept = harness.ask(piece(2, PROMPTS[3]))
    too_long = harness.ask(piece(3, [1] * 128))
    for _ in range(3):
        assert harness.core.step()
    harness.core.requests.free([1])
    harness.run()
    assert aborted.error is not None
    assert isinstance(too_long.error, PromptTooLong)
    assert kept.ids == expected(PROMPTS[3])
