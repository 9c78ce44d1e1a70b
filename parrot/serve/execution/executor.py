"""Runs one attempt of one completion on one engine, in one exchange."""

from contextlib import aclosing

from parrot.protocol.engine_api import (
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    StreamChunk,
    Usage,
)
from parrot.protocol.errors import EngineFailed
from parrot.serve.contexts.index import Boundary
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.contexts.think_time import Source
from parrot.serve.execution.request import open_request
from parrot.serve.execution.run import Attempt, Outcome
from parrot.serve.prompts.encode import Units, encode_prompt, encode_text
from parrot.serve.prompts.segments import extend_key, output_segment
from parrot.serve.prompts.tokenizers import Ids, TokenizerRegistry

_MAX_HELD_BACK = 8  # ids at a stream's end whose text may not have been delivered yet


class Executor:
    """`run` opens contexts in the ledger and pins one. Exactly one of `finish`, `abandon` and
    `forget` must follow, also after it was cancelled."""

    def __init__(self, ledger: ContextLedger, tokenizers: TokenizerRegistry) -> None:
        self._ledger = ledger
        self._tokenizers = tokenizers

    async def run(self, attempt: Attempt) -> Outcome:
        """Raises the engine's error, or `PromptTooLong` and the like before the engine is asked.
        What is streamed is appended to the completion's output on the way."""
        info, task = attempt.engine.info, attempt.task
        completion = task.completion
        if info.tokenizer_id is not None:
            attempt.tokenizer = self._tokenizers.get(info.model, info.tokenizer_id)
        chat = completion.options.chat
        parts = await encode_prompt(task.segments, chat, attempt.tokenizer)
        if completion.output.partial_text:
            await self._resume(attempt)
        request = open_request(self._ledger, attempt, parts)
        if request is None:
            return Outcome(attempt.delivered, None, 0, _nothing_more())
        if task.wants_stream:
            response = await self._stream(attempt, request)
        else:
            response = await attempt.engine.client.generate(request)
        return _outcome(attempt, response)

    def finish(self, attempt: Attempt, outcome: Outcome) -> None:
        """Keep its contexts for whoever continues them."""
        context, attempt.context = attempt.context, None
        if context is None:
            return
        clean: Units | None = outcome.text if attempt.tokenizer is None else outcome.ids
        boundary = None
        if clean:
            key = extend_key(attempt.task.keys[-1], output_segment(outcome.text, None))
            start = context.length - len(attempt.resumed)
            boundary = Boundary(key, start + len(clean), clean[-1])
        source = Source.of(attempt.task.completion)
        self._ledger.settle(context, context.length + outcome.num_units, boundary, source)
        self._ledger.unpin(context)

    def abandon(self, attempt: Attempt, *, with_parents: bool = False) -> None:
        """Let nobody else begin with what it opened, as far as that is not known to be computed, or
        with anything that its context was forked from. Those who did already go on."""
        own, attempt.context = attempt.context, None
        if own is None:
            return
        for context in attempt.opened:
            if context is own or not context.is_computed:
                self._ledger.retire(context)
        if with_parents:
            self._ledger.retire_chain(own)
        self._ledger.unpin(own)

    def forget(self, attempt: Attempt) -> None:
        """Its engine is gone with all contexts."""
        attempt.context = None

    async def _resume(self, attempt: Attempt) -> None:
        """Readers have the beginning of the output: go on behind it."""
        task, tokenizer = attempt.task, attempt.tokenizer
        if attempt.sampling.regex is not None or attempt.sampling.json_schema is not None:
            raise EngineFailed("the engine was lost while it streamed a constrained output")
        text = attempt.delivered = task.completion.output.partial_text
        if tokenizer is not None and task.streamed_by == tokenizer.tokenizer_id:
            ids = task.streamed_ids
            for end in range(len(ids), max(0, len(ids) - _MAX_HELD_BACK), -1):
                if tokenizer.encoder.decode(ids[:end]) == text:
                    attempt.resumed = tuple(ids[:end])
                    return
        attempt.resumed = await encode_text(text, tokenizer)

    async def _stream(self, attempt: Attempt, request: GenerateRequest) -> GenerateResponse:
        task = attempt.task
        task.streamed_by = attempt.tokenizer.tokenizer_id if attempt.tokenizer else None
        task.streamed_ids = [unit for unit in attempt.resumed if isinstance(unit, int)]
        async with aclosing(attempt.engine.client.generate_stream(request)) as events:
            async for event in events:
                if not isinstance(event, StreamChunk):
                    return event
                if attempt.context is not None:
                    self._ledger.mark_computed(attempt.context)
                task.streamed_ids.extend(event.ids)
                task.append(event.text)
        raise EngineFailed("the engine's stream ended without a result")


def _outcome(attempt: Attempt, response: GenerateResponse) -> Outcome:
    text = attempt.delivered + response.generated_text
    if not text.startswith(attempt.task.completion.output.partial_text):
        raise EngineFailed("the engine's result contradicts what it streamed")
    if attempt.tokenizer is None:
        return Outcome(text, None, len(response.generated_text), response)
    ids = _clean_ids(attempt, response)
    return Outcome(text, ids, len(response.generated_ids), response)


def _clean_ids(attempt: Attempt, response: GenerateResponse) -> Ids | None:
    """The ids of the whole text, if they are known."""
    assert attempt.tokenizer is not None
    sampling = attempt.sampling
    stop_ids = set(sampling.stop_token_ids)
    if not sampling.ignore_tokenizer_eos:
        stop_ids |= attempt.tokenizer.eos
    stopped = response.finish_reason is FinishReason.STOP
    ids = attempt.tokenizer.clean_output(response.generated_ids, stop_ids, stopped)
    if ids is None or (response.generated_text and not ids):
        return None
    resumed = attempt.resumed
    return None if isinstance(resumed, str) else (*resumed, *ids)


def _nothing_more() -> GenerateResponse:
    return GenerateResponse(
        generated_text="", generated_ids=[], finish_reason=FinishReason.LENGTH, usage=Usage()
    )
