"""Continue a partial output: the text that earlier attempts delivered is appended to the prompt."""

from collections.abc import Sequence

from parrot.protocol.engine_api import FinishReason, GenerateResponse, Usage
from parrot.protocol.errors import EngineFailed
from parrot.serve.execution.run import Attempt, Outcome, Run
from parrot.serve.graph.nodes import TokenizedText
from parrot.serve.prompts.encode import Ids, ModelTokenizer, encode_text

# A decoder returns this character for bytes that are not a complete character.
_REPLACEMENT_CHAR = "\ufffd"
# Number of tokens at a stream's end whose text may not be delivered yet, because it may be part of
# a stop string or of a character.
_MAX_HELD_BACK = 8

NO_MORE_OUTPUT = GenerateResponse(
    generated_text="", generated_ids=[], finish_reason=FinishReason.LENGTH, usage=Usage()
)


def deliver_reported(run: Run, attempt: Attempt) -> None:
    """Deliver the reported tokens of an earlier attempt, as far as their text is stable.

    Nothing is delivered if the text is uncertain, or if this engine cannot continue it. Then the
    output starts again from its first token."""
    reported, run.reported = run.reported, None
    sampling = run.completion.sampling
    if reported is None or not attempt.can_resume:
        return
    encoder = reported.tokenizer.encoder
    special_ids = reported.tokenizer.stop_ids(sampling).union(encoder.special_ids)
    if not special_ids.isdisjoint(reported.ids):
        return  # Some engines show special tokens as text, so the text is uncertain.
    for end in range(len(reported.ids), max(0, len(reported.ids) - _MAX_HELD_BACK), -1):
        text = encoder.decode(reported.ids[:end])
        if text.startswith(run.text) and _is_stable(text, sampling.stop_strings):
            run.tokenizer_id = reported.tokenizer.tokenizer_id
            run.ids, run.num_streamed = list(reported.ids[:end]), end
            run.append(text[len(run.text) :])
            return


def _is_stable(text: str, stop_strings: Sequence[str]) -> bool:
    """Whether the text ends neither inside a character nor with a prefix of a stop string."""
    prefixes = (stop[:n] for stop in stop_strings for n in range(1, len(stop) + 1))
    return not text.endswith((_REPLACEMENT_CHAR, *prefixes))


async def resume(run: Run, attempt: Attempt) -> None:
    """Make the attempt continue after the delivered text.

    Raises `EngineFailed` if the engine cannot continue it (`Attempt.can_resume`)."""
    if not attempt.can_resume:
        raise EngineFailed(
            "the engine was lost while it streamed an output that cannot be continued"
        )
    ids = None if attempt.tokenizer is None else _ids_of_text(run, attempt.tokenizer)
    logprobs = run.stats.logprobs
    if ids and logprobs is not None and len(logprobs) == len(run.ids):
        run.stats.logprobs = logprobs.part(0, len(ids))
    attempt.resumed = ids or await encode_text(run.text, attempt.tokenizer)
    is_text = attempt.tokenizer is None
    attempt.num_delivered = run.num_streamed if is_text else len(attempt.resumed)
    attempt.resumed_key = run.output_key(run.text)


def _ids_of_text(run: Run, tokenizer: ModelTokenizer) -> Ids | None:
    """The streamed ids that stand for exactly the delivered text; None if there are none."""
    if run.tokenizer_id != tokenizer.tokenizer_id:
        return None
    ids = run.ids
    for end in range(len(ids), max(0, len(ids) - _MAX_HELD_BACK), -1):
        if tokenizer.encoder.decode(ids[:end]) == run.text:
            return tuple(ids[:end])
    return None


def partial_outcome(run: Run, attempt: Attempt) -> Outcome:
    """The outcome of a stopped attempt: the output that the run has delivered so far."""
    tokenizer = attempt.tokenizer
    if tokenizer is None:
        return Outcome(run.text, None, len(run.text) - len(attempt.resumed), NO_MORE_OUTPUT)
    ids = _ids_of_text(run, tokenizer)
    tokenized = None if ids is None else TokenizedText(tokenizer.tokenizer_id, ids)
    return Outcome(run.text, tokenized, len(run.ids) - len(attempt.resumed), NO_MORE_OUTPUT)
