"""The exchange with an engine: from a placed run to its outcome.

The exchange opens contexts for the request. Afterwards it keeps them as cache, or retires them."""

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import aclosing

from parrot.protocol.engine_api import (
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    StreamChunk,
)
from parrot.protocol.errors import EngineFailed, ParrotError
from parrot.protocol.sampling import Logprobs, SamplingConfig
from parrot.serve.contexts.index import Boundary, Source
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.execution.drafting import DraftTexts
from parrot.serve.execution.fleet import Engine
from parrot.serve.execution.prompting import count_cached, open_request
from parrot.serve.execution.resuming import (
    NO_MORE_OUTPUT,
    deliver_reported,
    resume,
)
from parrot.serve.execution.run import Attempt, Outcome, Run
from parrot.serve.graph.nodes import TokenizedText
from parrot.serve.prompts.encode import ModelTokenizer, Units, encode_prompt
from parrot.utils.clock import Clock
from parrot.utils.tasks import TaskSet


class Exchange:
    """Sends runs to engines. `run` opens contexts in the ledger and pins one of them.

    Exactly one of `keep` and `abandon` must follow each `run`, even a cancelled one. The exception
    is an attempt whose engine was lost."""

    def __init__(self, ledger: ContextLedger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock
        self._drafts: DraftTexts | None = None
        self._followers = TaskSet()
        self._unstreamed: dict[int, Attempt] = {}  # Attempts in flight, by context id.

    def use_drafts(self) -> None:
        """Keep draft texts from now on, because an engine uses them."""
        self._drafts = self._drafts or DraftTexts()

    async def run(self, run: Run, attempt: Attempt) -> Outcome:
        """Send the request and return the outcome. Streamed text is delivered to the waiters.

        Raises the engine's error. Raises `PromptTooLong` and other errors of the prompt before the
        request is sent."""
        if run.reported is not None:
            deliver_reported(run, attempt)
        if not run.text:
            run.stats.logprobs = None
        if run.text:
            await resume(run, attempt)
        drafts = None if self._drafts is None else await self._drafts.sources(attempt)
        # Encode last: during another `await`, the contexts that it has found may be freed.
        parts = await self._encode(run, attempt)
        request = open_request(self._ledger, run, attempt, parts, drafts)
        if request is None:
            return Outcome(run.text, None, 0, NO_MORE_OUTPUT)
        attempt.is_sent = True
        before = run.text
        logprobs = None if run.stats.logprobs is None else run.stats.logprobs.part(0)
        if run.wants_stream or run.is_racing:
            response = await self._stream(run, attempt, request)
        else:
            attempt.is_unstreamed = True
            self._unstreamed[request.context_id] = attempt
            try:
                response = await attempt.engine.client.generate(request)
            finally:
                del self._unstreamed[request.context_id]
                attempt.stop_following()
        outcome = _outcome(run, attempt, before, response)
        if self._drafts is not None:
            self._drafts.learn(run.completion, outcome)
        run.stats.logprobs = _logprobs(logprobs, attempt, response)
        return outcome

    def follow(self, run: Run) -> None:
        """Stream the output of a request in flight. No effect if it is streamed already, or if the
        request was not sent yet."""
        attempt = run.attempt
        if attempt is not None and attempt.is_unstreamed and attempt.follower is None:
            name = f"follower of completion {run.completion.id}"
            attempt.follower = self._followers.spawn(self._follow(run, attempt), name=name)

    def record_reported(self, engine: Engine) -> None:
        """Store the output tokens in the engine's heartbeat, for the case that the engine is lost.

        A report may overlap with an earlier one. A report after a gap is ignored."""
        for part in () if engine.runtime is None else engine.runtime.outputs:
            attempt = self._unstreamed.get(part.context_id)
            if attempt is None or attempt.engine is not engine:
                continue
            if part.start <= len(attempt.reported_ids) < part.end:
                attempt.reported_ids[part.start :] = part.token_ids()

    async def close(self) -> None:
        await self._followers.close()

    def keep(self, run: Run, attempt: Attempt, outcome: Outcome, source: Source | None) -> None:
        """Keep the context with the output, so that later calls can continue it. `source`: the
        function that made the output; None if the output is partial."""
        context, attempt.context = attempt.context, None
        if context is None:
            return
        ids = None if outcome.tokenized is None else outcome.tokenized.ids
        clean: Units | None = outcome.text if attempt.tokenizer is None else ids
        boundary = None
        if clean:
            end = context.length - len(attempt.resumed) + len(clean)
            boundary = Boundary(run.output_key(outcome.text), end, clean[-1])
        self._ledger.finish_generation(
            context, context.length + outcome.num_units, boundary, source
        )
        self._ledger.unpin(context)

    def abandon(self, attempt: Attempt, *, with_parents: bool = False) -> None:
        """Retire the attempt's own context, and the opened contexts that may not be computed. Runs
        that have forked them continue. `with_parents`: also retire all ancestors."""
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
        """One item per segment of the prompt. Segments that the engine holds are empty, so a long
        conversation is not encoded again for each turn. Raises the errors of `encode_prompt`."""
        engine, tokenizer = attempt.engine, attempt.tokenizer
        if run.completion.options.chat or tokenizer is None:
            chat = run.completion.options.chat
            return await encode_prompt(run.segments, chat, tokenizer, limit=engine.max_len)
        while True:
            num_known, num_tokens = count_cached(self._ledger, engine, run.keys)
            missing = await encode_prompt(
                run.segments[num_known:],
                False,
                tokenizer,
                limit=engine.max_len,
                num_before=num_tokens,
            )
            # Otherwise a context was evicted during the encoding: encode more segments.
            if count_cached(self._ledger, engine, run.keys)[0] >= num_known:
                return [()] * num_known + missing

    async def _stream(
        self, run: Run, attempt: Attempt, request: GenerateRequest
    ) -> GenerateResponse:
        _start_stream(run, attempt)
        run.stats.is_streamed = True

        def take(chunk: StreamChunk) -> None:
            if run.attempt is attempt:  # Otherwise the attempt is being stopped.
                self._deliver_chunk(run, attempt, chunk)

        return await attempt.engine.client.generate(request, take)

    async def _follow(self, run: Run, attempt: Attempt) -> None:
        """Stream the output of an unstreamed request, from its first token. If streaming fails, the
        output is delivered when it is finished."""
        assert attempt.context is not None, attempt
        _start_stream(run, attempt)
        try:
            async with aclosing(attempt.engine.client.follow(attempt.context.id)) as chunks:
                async for chunk in chunks:
                    self._deliver_chunk(run, attempt, chunk, is_late=True)
        except ParrotError as error:
            run.stats.comes_whole = error.message

    def _deliver_chunk(
        self, run: Run, attempt: Attempt, chunk: StreamChunk, *, is_late: bool = False
    ) -> None:
        """`is_late`: the engine may have generated the chunk's tokens long before."""
        if attempt.context is not None:
            attempt.context.mark_computed()
        if run.num_streamed == attempt.num_delivered and not is_late:
            now = self._clock.now()
            for waiter in run.waiters:
                waiter.times.first_token = now
        tokens = None if attempt.tokenizer is None else attempt.tokenizer.encoder.vocabulary
        run.ids.extend(chunk.ids)
        run.num_streamed += max(len(chunk.ids), 1)
        run.stats.logprobs = Logprobs.joined(run.stats.logprobs, chunk.logprobs, tokens)
        run.append(chunk.text)


def _start_stream(run: Run, attempt: Attempt) -> None:
    run.tokenizer_id = attempt.tokenizer.tokenizer_id if attempt.tokenizer else None
    run.ids = attempt.resumed_ids
    run.num_streamed = attempt.num_delivered


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
    """The ids that stand for exactly the whole text; None if there are none."""
    stop_ids = tokenizer.stop_ids(attempt.sampling)
    stopped = response.finish_reason is FinishReason.STOP
    if attempt.sampling.constraint is not None and not attempt.sampling.stop_strings:
        # Without a stop token at the end, the grammar has ended the output.
        stopped = not stop_ids.isdisjoint(response.generated_ids[-1:])
    ids = tokenizer.clean_output(response.generated_ids, stop_ids, stopped)
    if ids is None or isinstance(attempt.resumed, str) or (response.generated_text and not ids):
        return None
    return TokenizedText(tokenizer.tokenizer_id, (*attempt.resumed, *ids))


def _logprobs(
    before: Logprobs | None, attempt: Attempt, response: GenerateResponse
) -> Logprobs | None:
    """The log probabilities of the whole output. `before`: the part from earlier attempts."""
    found, tokenizer = response.logprobs, attempt.tokenizer
    if found is None or tokenizer is None:
        return Logprobs.joined(before, found)
    num_shown = _num_shown(attempt.sampling, tokenizer, response)
    return Logprobs.joined(before, found, tokenizer.encoder.vocabulary, num_shown)


def _num_shown(
    sampling: SamplingConfig, tokenizer: ModelTokenizer, response: GenerateResponse
) -> int:
    """The number of generated tokens whose text is part of the output. Stop tokens are not."""
    ids = response.generated_ids
    if response.finish_reason is not FinishReason.STOP or not ids:
        return len(ids)
    if ids[-1] in tokenizer.stop_ids(sampling):
        return len(ids) - 1
    if not sampling.stop_strings:
        return len(ids)
    wanted = len(response.generated_text)
    return bisect_left(
        range(len(ids)), wanted, key=lambda n: len(tokenizer.encoder.decode(ids[:n]))
    )
