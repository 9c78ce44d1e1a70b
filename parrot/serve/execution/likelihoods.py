"""The log probabilities of a run's output, over all of its attempts."""

from bisect import bisect_left

from parrot.protocol.engine_api import FinishReason, GenerateResponse
from parrot.protocol.sampling import Logprobs, SamplingConfig
from parrot.serve.execution.run import Attempt
from parrot.serve.prompts.tokenizers import ModelTokenizer


def stop_ids_of(sampling: SamplingConfig, tokenizer: ModelTokenizer) -> frozenset[int]:
    """The tokens that end an output."""
    eos: frozenset[int] = frozenset() if sampling.ignore_tokenizer_eos else tokenizer.eos
    return eos.union(sampling.stop_token_ids)


def joined_logprobs(
    before: Logprobs | None, attempt: Attempt, response: GenerateResponse
) -> Logprobs | None:
    """Log probabilities of earlier attempts, and of the tokens of the response's text; what ended
    it is their `ending`."""
    found, tokenizer = response.logprobs, attempt.tokenizer
    if found is None or tokenizer is None:
        return appended(before, found, tokenizer)
    num_shown = _num_shown(attempt.sampling, tokenizer, response)
    joined = appended(before, found.part(0, num_shown), tokenizer)
    if joined is not None:
        joined.ending = appended(None, found.part(num_shown), tokenizer)
    return joined


def appended(
    before: Logprobs | None, more: Logprobs | None, tokenizer: ModelTokenizer | None
) -> Logprobs | None:
    """`before`, which is changed, with `more` of an engine with this tokenizer behind it."""
    if more is None:
        return before
    if tokenizer is not None:
        more.tokens = tokenizer.encoder.vocabulary
    if before is None:
        return more
    before.extend(more)
    return before


def _num_shown(
    sampling: SamplingConfig, tokenizer: ModelTokenizer, response: GenerateResponse
) -> int:
    ids = response.generated_ids
    if response.finish_reason is not FinishReason.STOP or not ids:
        return len(ids)
    if ids[-1] in stop_ids_of(sampling, tokenizer):
        return len(ids) - 1
    if not sampling.stop_strings:
        return len(ids)
    wanted = len(response.generated_text)
    return bisect_left(
        range(len(ids)), wanted, key=lambda n: len(tokenizer.encoder.decode(ids[:n]))
    )
