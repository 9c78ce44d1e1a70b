"""One exchange with an engine: from a placed run to its outcome, and what becomes of the contexts
that were opened for it."""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from parrot.protocol.engine_api import (
    MAX_DRAFT_TOKENS,
    NO_PARENT,
    DraftSources,
    EngineType,
    FillPiece,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    StreamChunk,
    Usage,
)
from parrot.protocol.errors import EngineFailed, InvalidRequest, ParrotError, PromptTooLong
from parrot.protocol.sampling import Logprobs, SamplingConfig
from parrot.serve.contexts.index import Boundary, LedgerContext, Owner, Source
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.execution.fleet import Engine
from parrot.serve.execution.run import Attempt, Outcome, Run
from parrot.serve.graph.nodes import Completion, TokenizedText, VariablePiece, given_name
from parrot.serve.prompts.encode import Ids, ModelTokenizer, Units, encode_prompt, encode_text, join
from parrot.serve.prompts.segments import extend_key, output_segment
from parrot.serve.scheduling.task import function_key
from parrot.utils.heaps import LruDict
from parrot.utils.tasks import TaskSet


def public_len(engine: Engine, prompt: Units) -> int:
    """The length of the longest public prefix, as far as it fills blocks, with which the prompt
    begins; 0: it begins with none."""
    return next((len(ids) for ids in _prefixes(engine) if prompt[: len(ids)] == ids), 0)


def longest_public(engine: Engine) -> int:
    """The length of the longest one that any prompt has."""
    return max(map(len, _prefixes(engine)), default=0)


def _prefixes(engine: Engine) -> list[Units]:
    """The longest first."""
    if engine.tokenizer is None:
        return []  # its contexts are text
    size = engine.info.block_size
    return [ids[: len(ids) - len(ids) % size] for ids in engine.tokenizer.public]


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


_MAX_FUNCTIONS = 1024
_KEPT_OUTPUTS = 4  # of one function
_SENT_OUTPUTS = 2
_MAX_OUTPUT = 4096  # tokens; what comes behind is not kept
_ENOUGH = 256.0  # drafted tokens that tell whether drafts pay
_MEMORY = 2048.0  # drafted tokens after which older ones count half
_LEAST_ACCEPTED = 0.1  # of the tokens drafted
_TRIES = 16  # every so many calls, one is drafted although that did not pay

_NOTHING = DraftSources(in_context=False)


class _Output(NamedTuple):
    session_id: int
    tokenizer_id: str
    ids: "array[int]"


@dataclass(slots=True)
class _Function:
    """The newest output is the last."""

    outputs: deque[_Output] = field(default_factory=lambda: deque(maxlen=_KEPT_OUTPUTS))
    drafted: float = 0.0
    accepted: float = 0.0
    num_skipped: int = 0

    def count(self, usage: Usage) -> None:
        if self.drafted > _MEMORY:
            self.drafted, self.accepted = self.drafted / 2, self.accepted / 2
        self.drafted += usage.drafted_tokens
        self.accepted += usage.accepted_tokens

    def is_to_be_drafted(self) -> bool:
        if self.drafted < _ENOUGH or self.accepted >= _LEAST_ACCEPTED * self.drafted:
            return True
        self.num_skipped += 1
        return self.num_skipped % _TRIES == 0

    def texts(self, session_id: int, tokenizer_id: str) -> list[list[int]]:
        """The newest outputs, those of this session first. Siblings of a fan-out are among them."""
        usable = [o for o in reversed(self.outputs) if o.tokenizer_id == tokenizer_id]
        usable.sort(key=lambda output: output.session_id != session_id)
        return [output.ids.tolist() for output in usable[:_SENT_OUTPUTS]]


class DraftTexts:
    """Keeps the last outputs of functions, for each cache salt its own, and what drafts came to: a
    function whose drafts are hardly ever right is not drafted any more, but for a try now and
    then. Functions are those whose calls differ in variables."""

    def __init__(self) -> None:
        self._functions: LruDict[int, _Function] = LruDict(_MAX_FUNCTIONS)

    async def sources(self, attempt: Attempt) -> DraftSources | None:
        """The texts for an attempt's drafts; None if the engine finds its own, or has none."""
        completion, tokenizer = attempt.task.completion, attempt.tokenizer
        if tokenizer is None or attempt.engine.info.engine_type is not EngineType.BUILTIN:
            return None
        function = self._functions.get(function_key(completion))
        if function is not None and not function.is_to_be_drafted():
            return _NOTHING
        texts: list[Sequence[int]] = []
        if prediction := completion.options.prediction:
            units = await encode_text(prediction, tokenizer)
            texts.append([unit for unit in units if isinstance(unit, int)])
        if function is not None:
            texts += function.texts(completion.session_id, tokenizer.tokenizer_id)
        room = MAX_DRAFT_TOKENS
        cut: list[list[int]] = []
        for text in texts:
            cut.append(list(text[:room]))
            room -= len(cut[-1])
        return DraftSources.model_construct(texts=tuple(cut)) if any(cut) else None

    def learn(self, completion: Completion, outcome: Outcome) -> None:
        """Take in the output of a call, and what its drafts came to."""
        if outcome.tokenized is None or not _has_variables(completion):
            return
        key = function_key(completion)
        if (function := self._functions.get(key)) is None:
            self._functions.put(key, function := _Function())
        function.count(outcome.response.usage)
        ids = array("i", outcome.tokenized.ids[:_MAX_OUTPUT])
        function.outputs.append(_Output(completion.session_id, outcome.tokenized.tokenizer_id, ids))


def _has_variables(completion: Completion) -> bool:
    return any(isinstance(piece, VariablePiece) for piece in completion.fill)


def known_of(ledger: ContextLedger, engine: Engine, keys: Sequence[bytes]) -> tuple[int, int]:
    """How many of a prompt's segments need not be encoded, since the engine has them, and their
    tokens; none of what may be a part of a public prefix."""
    match = ledger.index.match(engine.id, keys)
    if match is None or match.boundary.length < longest_public(engine):
        return 0, 0
    return match.num_covered, match.boundary.length


def open_request(
    ledger: ContextLedger, run: Run, attempt: Attempt, parts: Sequence[Units]
) -> GenerateRequest | None:
    """Open and pin the attempt's contexts and say how to fill them; `parts` is the prompt, an item
    per segment, no matter which for those that the engine has. None if nothing may be generated any
    more. Raises `PromptTooLong`."""
    engine, completion = attempt.engine, run.completion
    prompt = _Prompt(ledger, attempt, parts)
    room = prompt.limit_output()
    if room == 0:
        return None
    missing = prompt.missing()
    attempt.lost = ledger.log.used(engine.id, prompt.length, missing)
    prompt.extend_constant()
    context = attempt.context = prompt.extend(run.owner, reserved=room)
    ledger.pin(context)
    ledger.make_room(engine.id, completion.options.tenant)
    return GenerateRequest.model_construct(
        session_id=completion.session_id,
        task_id=completion.id,
        attempt=run.stats.attempts,
        priority=attempt.priority,
        cache_salt=completion.options.cache_salt,
        tenant=completion.options.tenant,
        weight=attempt.share.weight,
        step_growth=attempt.share.step_growth,
        traceparent=completion.traceparent,
        conversation=run.conversation,
        context_id=context.id,
        fills=prompt.fills,
        sampling_config=attempt.sampling,
        resumed_ids=_resumed_ids(attempt),
    )


def _resumed_ids(attempt: Attempt) -> list[int]:
    """The tokens behind which an output goes on."""
    return [unit for unit in attempt.resumed if isinstance(unit, int)]


def open_fill(ledger: ContextLedger, attempt: Attempt, parts: Sequence[Units]) -> list[FillPiece]:
    """Do the same for the beginning of a prompt, behind which nothing is generated. Nothing is to
    be filled and no context is opened if the engine has it all."""
    prompt = _Prompt(ledger, attempt, parts)
    prompt.extend_constant()
    if any(parts[prompt.covered :]):
        prompt.extend(attempt.task.completion.session_id)
    if attempt.opened:
        attempt.context = attempt.opened[-1]
        ledger.pin(attempt.context)
    return prompt.fills


@dataclass(slots=True)
class _Prompt:
    """How far the prompt is there: `parent` has its first `covered` parts, `length` units, of which
    `last` is the last. What was delivered of the output is its last part. `public_len`: the first
    units that are public, unless `parent` has them."""

    ledger: ContextLedger
    attempt: Attempt
    parts: Sequence[Units]
    keys: Sequence[bytes] = ()
    covered: int = 0
    parent: LedgerContext | None = None
    length: int = 0
    last: int | str = ""
    public_len: int = 0
    fills: list[FillPiece] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = self.attempt.task.keys
        if self.attempt.resumed:
            self.parts = [*self.parts, self.attempt.resumed]
            self.keys = [*self.keys, self.attempt.resumed_key]
        engine = self.attempt.engine
        match = self.ledger.index.match(engine.id, self.keys)
        if match is None or match.boundary.length < longest_public(engine):
            self.public_len = public_len(engine, join(self.parts))
        if match is not None and match.boundary.length >= self.public_len:
            self.public_len = 0
            self.covered, self.parent = match.num_covered, match.context
            _, self.length, self.last = match.boundary

    def missing(self) -> list[tuple[bytes, int]]:
        """The key and length of each beginning that is not there."""
        return list(zip(self.keys[self.covered :], self._ends(len(self.parts)), strict=True))

    def limit_output(self) -> int:
        """How much room the output needs, in the engine's units; limits the attempt's sampling to
        it. Engines with text know their limits themselves, so there it is only a guess."""
        attempt = self.attempt
        room = attempt.sampling.max_gen_length - attempt.num_delivered
        length = self.length + sum(map(len, self.parts[self.covered :]))
        if not length:
            raise InvalidRequest("the prompt is empty")
        if attempt.tokenizer is not None:
            limit = attempt.engine.max_len
            prompt_len = length - len(attempt.resumed)
            is_cut = room > limit - length and not attempt.is_longest
            if prompt_len >= limit or is_cut:
                message = f"the prompt has {prompt_len} tokens; the limit is {limit - 1}"
                raise PromptTooLong(message)
            room = min(room, limit - length)
        room = max(0, room)
        if room and room != attempt.sampling.max_gen_length:
            attempt.sampling = attempt.sampling.model_copy(update={"max_gen_length": room})
        return room

    def extend_constant(self) -> None:
        """A context with the constant beginning, if that is longer than what is there."""
        task = self.attempt.task
        options, num_constant = task.completion.options, task.num_constant
        if not options.cache_prefix or num_constant <= self.covered:
            return
        length = self.length + sum(map(len, self.parts[self.covered : num_constant]))
        if length >= max(self.attempt.engine.info.block_size, self.public_len):
            self.extend(options.tenant, num_constant)

    def extend(self, owner: Owner, stop: int | None = None, reserved: int = 0) -> LedgerContext:
        """Fork: a context with the parts up to `stop`, by default all."""
        stop = len(self.parts) if stop is None else stop
        units = join(self.parts[self.covered : stop])
        boundaries = self._boundaries(stop)
        if not units:
            # An engine generates after a unit that the context itself was given.
            units = self.last if isinstance(self.last, str) else (self.last,)
            self.length -= 1
        context = self.ledger.open(
            self.attempt.engine.id,
            owner,
            boundaries,
            length=self.length + len(units),
            reserved=reserved,
            parent=self.parent,
            parent_len=self.length,
            function=given_name(self.attempt.task.completion),
            tenant=self.attempt.task.tenant,
        )
        self.attempt.opened.append(context)
        self.fills.append(
            FillPiece.model_construct(
                context_id=context.id,
                parent_context_id=NO_PARENT if self.parent is None else self.parent.id,
                parent_len=None if self.parent is None else self.length,
                token_ids=None if isinstance(units, str) else list(units),
                text=units if isinstance(units, str) else None,
                public_len=self.public_len if self.parent is None else 0,
            )
        )
        self.covered, self.parent, self.length = stop, context, context.length
        self.last = units[-1]
        return context

    def _boundaries(self, stop: int) -> list[Boundary]:
        """Where the parts up to `stop` end. Empty ones end where their predecessor does."""
        last, boundaries = self.last, []
        keys, parts = self.keys[self.covered : stop], self.parts[self.covered : stop]
        for key, end, part in zip(keys, self._ends(stop), parts, strict=True):
            last = part[-1] if part else last
            if end:
                boundaries.append(Boundary(key, end, last))
        return boundaries

    def _ends(self, stop: int) -> list[int]:
        """The lengths of the prompt at the ends of the parts up to `stop`, from what is there."""
        sizes = map(len, self.parts[self.covered : stop])
        return list(accumulate(sizes, initial=self.length))[1:]


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
