"""One exchange with an engine: from a placed run to its outcome, and what becomes of the contexts
that were opened for it."""

from collections.abc import Sequence
from contextlib import aclosing

from parrot.protocol.engine_api import (
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    StreamChunk,
    Usage,
)
from parrot.protocol.errors import EngineFailed, ParrotError
from parrot.serve.contexts.index import Boundary
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.contexts.think_time import Source
from parrot.serve.execution.draft_sources import DraftTexts
from parrot.serve.execution.fleet import Engine
from parrot.serve.execution.likelihoods import appended, joined_logprobs, stop_ids_of
from parrot.serve.execution.request import known_of, open_request
from parrot.serve.execution.run import Attempt, Outcome, Run
from parrot.serve.graph.variable import TokenizedText
from parrot.serve.prompts.encode import Units, encode_prompt, encode_text
from parrot.serve.prompts.segments import extend_key, output_segment
from parrot.serve.prompts.tokenizers import Ids, ModelTokenizer
from parrot.utils.tasks import TaskSet

_BROKEN = "\ufffd"  # how a decoder shows bytes that are not (yet) a character
_MAX_HELD_BACK = 8  # ids at a stream's end whose text may not have been delivered yet


class Exchange:
    """`run` opens contexts in the ledger and pins one. Exactly one of `keep` and `abandon` must
    follow, also after it was cancelled, unless the engine is lost."""

    def __init__(self, ledger: ContextLedger) -> None:
        self._ledger = ledger
        self._draft_texts = DraftTexts()
        self._followers = TaskSet()
        self._whole: dict[int, Attempt] = {}  # those under way, by their contexts

    async def run(self, run: Run, attempt: Attempt) -> Outcome:
        """Raises the engine's error, or `PromptTooLong` and the like before the engine is asked.
        What is streamed is given to those who wait for the run on the way."""
        _deliver_heard(run, attempt)
        if not run.text:
            run.stats.logprobs = None
        if run.text:
            await _resume(run, attempt)
        drafts = await self._draft_texts.sources(attempt)
        parts = await self._encode(run, attempt)  # last: what it found may be freed meanwhile
        request = open_request(self._ledger, run, attempt, parts)
        if request is None:
            return Outcome(run.text, None, 0, _NOTHING_MORE)
        request.drafts = drafts
        before = run.text
        logprobs = None if run.stats.logprobs is None else run.stats.logprobs.part(0)
        if run.wants_stream or run.may_lose:
            response = await self._stream(run, attempt, request)
        else:
            attempt.is_whole = True
            self._whole[request.context_id] = attempt
            try:
                response = await attempt.engine.client.generate(request)
            finally:
                del self._whole[request.context_id]
                attempt.unfollow()
        outcome = _outcome(run, attempt, before, response)
        self._draft_texts.learn(run.completion, outcome)
        run.stats.logprobs = joined_logprobs(logprobs, attempt, response)
        return outcome

    def follow(self, run: Run) -> None:
        """Somebody wants the output as it comes. No effect where it does come so, or no engine was
        asked yet."""
        attempt = run.attempt
        if attempt is not None and attempt.is_whole and attempt.follower is None:
            name = f"follower of completion {run.completion.id}"
            attempt.follower = self._followers.spawn(_follow(run, attempt), name=name)

    def heard(self, engine: Engine) -> None:
        """Keep the tokens that the engine has told of, for the case that it is lost. What was told
        before counts once; behind a gap nothing counts."""
        for part in () if engine.runtime is None else engine.runtime.outputs:
            attempt = self._whole.get(part.context_id)
            if attempt is None or attempt.engine is not engine:
                continue
            if part.start <= len(attempt.heard) < part.end:
                attempt.heard[part.start :] = part.token_ids()

    async def close(self) -> None:
        await self._followers.close()

    def keep(self, run: Run, attempt: Attempt, outcome: Outcome, source: Source | None) -> None:
        """Keep the context with the output, for whoever continues it. `source`: whose it is; None
        if it is not whole."""
        context, attempt.context = attempt.context, None
        if context is None:
            return
        ids = None if outcome.tokenized is None else outcome.tokenized.ids
        clean: Units | None = outcome.text if attempt.tokenizer is None else ids
        boundary = None
        if clean:  # it stands for exactly the output's text
            end = context.length - len(attempt.resumed) + len(clean)
            boundary = Boundary(_output_key(run, outcome.text), end, clean[-1])
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
            self._ledger.retire(own, with_ancestors=True)
        self._ledger.unpin(own)

    async def _encode(self, run: Run, attempt: Attempt) -> Sequence[Units]:
        """An item for each segment of the prompt. Those are empty that the engine has: a long
        conversation is not looked at again for every turn. Raises as `encode_prompt` does."""
        engine, tokenizer = attempt.engine, attempt.tokenizer
        if run.completion.options.chat or tokenizer is None:
            chat = run.completion.options.chat
            return await encode_prompt(run.segments, chat, tokenizer, limit=engine.max_len)
        while True:
            num_known, num_tokens = known_of(self._ledger, engine, run.keys)
            missing = await encode_prompt(
                run.segments[num_known:],
                False,
                tokenizer,
                limit=engine.max_len,
                num_before=num_tokens,
            )
            if (
                known_of(self._ledger, engine, run.keys)[0] >= num_known
            ):  # else it was freed meanwhile
                return [()] * num_known + missing

    async def _stream(
        self, run: Run, attempt: Attempt, request: GenerateRequest
    ) -> GenerateResponse:
        _begin_stream(run, attempt)

        def take(chunk: StreamChunk) -> None:
            if run.attempt is attempt:  # else it is being stopped
                _take(run, attempt, chunk)

        return await attempt.engine.client.generate(request, take)


async def _follow(run: Run, attempt: Attempt) -> None:
    """Deliver the whole output that the engine was asked for as it comes, from its beginning. If
    that fails, it is delivered in the end."""
    assert attempt.context is not None, attempt
    _begin_stream(run, attempt)
    try:
        async with aclosing(attempt.engine.client.follow(attempt.context.id)) as chunks:
            async for chunk in chunks:
                _take(run, attempt, chunk)
    except ParrotError as error:
        run.stats.comes_whole = error.message


def _begin_stream(run: Run, attempt: Attempt) -> None:
    run.tokenizer_id = attempt.tokenizer.tokenizer_id if attempt.tokenizer else None
    run.ids = [unit for unit in attempt.resumed if isinstance(unit, int)]
    run.num_streamed = attempt.num_delivered


def _take(run: Run, attempt: Attempt, chunk: StreamChunk) -> None:
    if attempt.context is not None:
        attempt.context.mark_computed()
    run.ids.extend(chunk.ids)
    run.num_streamed += max(len(chunk.ids), 1)
    run.stats.logprobs = appended(run.stats.logprobs, chunk.logprobs, attempt.tokenizer)
    run.append(chunk.text)


def _deliver_heard(run: Run, attempt: Attempt) -> None:
    """Deliver what was heard of an earlier attempt's output, up to where its text is certain, to go
    on behind it. What cannot be told for sure, or not be continued here, begins anew."""
    heard, run.heard = run.heard, None
    sampling = run.completion.sampling
    is_bound = sampling.constraint is not None or run.conversation is not None
    if heard is None or (attempt.tokenizer is None and is_bound):
        return
    encoder = heard.tokenizer.encoder
    if not stop_ids_of(sampling, heard.tokenizer).union(encoder.special_ids).isdisjoint(heard.ids):
        return  # an engine may show some special tokens as text
    for end in range(len(heard.ids), max(0, len(heard.ids) - _MAX_HELD_BACK), -1):
        text = encoder.decode(heard.ids[:end])
        if text.startswith(run.text) and _is_certain(text, sampling.stop_strings):
            run.tokenizer_id = heard.tokenizer.tokenizer_id
            run.ids, run.num_streamed = list(heard.ids[:end]), end
            run.append(text[len(run.text) :])
            return


def _is_certain(text: str, stop_strings: Sequence[str]) -> bool:
    """Whether it ends neither inside of a character nor with the beginning of a stop string."""
    beginnings = (stop[:n] for stop in stop_strings for n in range(1, len(stop) + 1))
    return not text.endswith((_BROKEN, *beginnings))


async def _resume(run: Run, attempt: Attempt) -> None:
    """Go on behind the text that was delivered. Raises `EngineFailed` for a constrained output on
    an engine that takes text: it cannot be told how far its grammar has come; and for an answer to
    a conversation that the server renders."""
    is_bound = attempt.sampling.constraint is not None or run.conversation is not None
    if attempt.tokenizer is None and is_bound:
        raise EngineFailed("the engine was lost while it streamed an output that cannot go on")
    ids = None if attempt.tokenizer is None else _ids_of_text(run, attempt.tokenizer)
    logprobs = run.stats.logprobs
    if ids and logprobs is not None and len(logprobs) == len(run.ids):
        run.stats.logprobs = logprobs.part(0, len(ids))
    attempt.resumed = ids or await encode_text(run.text, attempt.tokenizer)
    is_text = attempt.tokenizer is None
    attempt.num_delivered = run.num_streamed if is_text else len(attempt.resumed)
    attempt.resumed_key = _output_key(run, run.text)


def _ids_of_text(run: Run, tokenizer: ModelTokenizer) -> Ids | None:
    """The streamed ids that stand for exactly the text that was delivered, if there are such."""
    if run.tokenizer_id != tokenizer.tokenizer_id:
        return None
    ids = run.ids
    for end in range(len(ids), max(0, len(ids) - _MAX_HELD_BACK), -1):
        if tokenizer.encoder.decode(ids[:end]) == run.text:
            return tuple(ids[:end])
    return None


def _output_key(run: Run, text: str) -> bytes:
    return extend_key(run.keys[-1], output_segment(text, None))


def delivered(run: Run, attempt: Attempt) -> Outcome:
    """The part of the output that the run has delivered until now."""
    tokenizer = attempt.tokenizer
    if tokenizer is None:
        return Outcome(run.text, None, len(run.text) - len(attempt.resumed), _NOTHING_MORE)
    ids = _ids_of_text(run, tokenizer)
    tokenized = None if ids is None else TokenizedText(tokenizer.tokenizer_id, ids)
    return Outcome(run.text, tokenized, len(run.ids) - len(attempt.resumed), _NOTHING_MORE)


def _outcome(run: Run, attempt: Attempt, before: str, response: GenerateResponse) -> Outcome:
    text = before + response.generated_text
    if not text.startswith(run.text):
        raise EngineFailed("the engine's result contradicts what it streamed")
    if attempt.tokenizer is None:
        return Outcome(text, None, len(response.generated_text), response)
    tokenized = _tokenized(attempt, attempt.tokenizer, response)
    return Outcome(text, tokenized, len(response.generated_ids), response)


def _tokenized(
    attempt: Attempt, tokenizer: ModelTokenizer, response: GenerateResponse
) -> TokenizedText | None:
    """The ids of the whole text, if they are known."""
    stop_ids = stop_ids_of(attempt.sampling, tokenizer)
    stopped = response.finish_reason is FinishReason.STOP
    if attempt.sampling.constraint is not None and not attempt.sampling.stop_strings:
        stopped = not stop_ids.isdisjoint(response.generated_ids[-1:])  # else its grammar ended it
    ids = tokenizer.clean_output(response.generated_ids, stop_ids, stopped)
    if ids is None or isinstance(attempt.resumed, str) or (response.generated_text and not ids):
        return None
    return TokenizedText(tokenizer.tokenizer_id, (*attempt.resumed, *ids))


_NOTHING_MORE = GenerateResponse(
    generated_text="", generated_ids=[], finish_reason=FinishReason.LENGTH, usage=Usage()
)
