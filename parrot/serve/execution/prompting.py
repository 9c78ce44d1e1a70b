"""Build an engine's request from a prompt: which context to fork, which pieces to fill, how long
the output may be, and which prefix is public. Units are tokens, or characters of text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from parrot.protocol.engine_api import NO_PARENT, DraftSources, FillPiece, GenerateRequest
from parrot.protocol.errors import InvalidRequest
from parrot.serve.contexts.index import Boundary, LedgerContext, Owner
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.execution.fleet import Engine
from parrot.serve.execution.run import Attempt, Run
from parrot.serve.graph.nodes import given_name
from parrot.serve.prompts.encode import CountedPromptTooLong, Units, join

# Characters of a prompt that are kept with its context, from its first segments.
_MAX_HEAD, _MAX_HEAD_SEGMENTS = 60, 4


def public_len(engine: Engine, prompt: Units) -> int:
    """The length of the prompt's longest public prefix, in units of whole blocks; 0 without one."""
    return next((len(ids) for ids in _prefixes(engine) if prompt[: len(ids)] == ids), 0)


def max_public_len(engine: Engine) -> int:
    """The length of the engine's longest public prefix, in units of whole blocks."""
    return max(map(len, _prefixes(engine)), default=0)


def _prefixes(engine: Engine) -> list[Units]:
    """The engine's public prefixes, cut to whole blocks, the longest first."""
    if engine.tokenizer is None:
        return []  # Contexts of text have no public prefixes.
    size = engine.info.block_size
    return [ids[: len(ids) - len(ids) % size] for ids in engine.tokenizer.public]


def count_cached(ledger: ContextLedger, engine: Engine, keys: Sequence[bytes]) -> tuple[int, int]:
    """The number of the prompt's segments that a context of the engine holds, and their units.

    Returns (0, 0) if they may end inside a public prefix: then the prompt must be encoded to find
    out."""
    match = ledger.index.match(engine.id, keys)
    if match is None or match.boundary.length < max_public_len(engine):
        return 0, 0
    return match.num_covered, match.boundary.length


_BLANK = GenerateRequest.model_construct(context_id=0)  # A copy is faster than a construction.


def open_request(
    ledger: ContextLedger,
    run: Run,
    attempt: Attempt,
    parts: Sequence[Units],
    drafts: DraftSources | None,
) -> GenerateRequest | None:
    """Open the attempt's contexts, pin the last one, and return the request.

    `parts`: the units of each segment of the prompt. Segments that the engine holds may be empty.
    None if the output has reached its limit. Raises `PromptTooLong`."""
    engine, completion = attempt.engine, run.completion
    prompt = _Prompt(ledger, attempt, parts)
    max_output = prompt.limit_output()
    if max_output == 0:
        return None
    missing = prompt.missing()
    attempt.cache_miss = ledger.kv_stats.record_prompt(engine.id, prompt.length, missing)
    prompt.open_constant_prefix()
    attempt.context = context = prompt.open_context(run.owner, reserved=max_output, is_pinned=True)
    ledger.evict_to_capacity(engine.id, completion.options.tenant)
    fields = {
        "session_id": completion.session_id,
        "task_id": completion.id,
        "attempt": run.stats.attempts,
        "priority": attempt.priority,
        "cache_salt": completion.options.cache_salt,
        "tenant": completion.options.tenant,
        "weight": attempt.share.weight,
        "step_growth": attempt.share.step_growth,
        "traceparent": completion.traceparent,
        "request_id": completion.options.request_id,
        "client_key": completion.options.client_key,
        "conversation": attempt.conversation,
        "context_id": context.id,
        "fills": prompt.fills,
        "sampling_config": attempt.sampling,
        "resumed_ids": attempt.resumed_ids,
        "drafts": drafts,
    }
    return _BLANK.model_copy(update=fields)


def open_fill(ledger: ContextLedger, attempt: Attempt, parts: Sequence[Units]) -> list[FillPiece]:
    """Open contexts for a prefix without an output, and pin the last one. Returns the pieces to
    fill; none if the engine holds the whole prefix."""
    prompt = _Prompt(ledger, attempt, parts)
    prompt.open_constant_prefix()
    if any(parts[prompt.covered :]):
        prompt.open_context(attempt.task.completion.session_id)
    if attempt.opened:
        attempt.context = attempt.opened[-1]
        ledger.pin(attempt.context)
    return prompt.fills


@dataclass(slots=True)
class _Prompt:
    """A prompt on its way to an engine: `parent` holds its first `covered` parts."""

    ledger: ContextLedger
    attempt: Attempt
    parts: Sequence[Units]  # One per segment; the output of earlier attempts is the last.
    keys: Sequence[bytes] = ()  # The prefix key of each part.
    covered: int = 0
    parent: LedgerContext | None = None
    length: int = 0  # Units of the covered parts.
    last: int | str = ""  # The last covered unit.
    public_len: int = 0  # Length of the prompt's public prefix; 0 if `parent` holds it.
    fills: list[FillPiece] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = self.attempt.task.keys
        if self.attempt.resumed:
            self.parts = [*self.parts, self.attempt.resumed]
            self.keys = [*self.keys, self.attempt.resumed_key]
        engine = self.attempt.engine
        match = self.ledger.index.match(engine.id, self.keys)
        if match is None or match.boundary.length < max_public_len(engine):
            self.public_len = public_len(engine, join(self.parts))
        if match is not None and match.boundary.length >= self.public_len:
            self.public_len = 0
            self.covered, self.parent = match.num_covered, match.context
            _, self.length, self.last = match.boundary

    def missing(self) -> list[tuple[bytes, int]]:
        """The key and length of each prefix that the engine does not hold."""
        return list(zip(self.keys[self.covered :], self._ends(len(self.parts)), strict=True))

    def limit_output(self) -> int:
        """Cut the attempt's `max_gen_length` to the engine's limit, and return it.

        Engines that take text enforce their own limits, so for them only the tokens that were
        already delivered are subtracted."""
        attempt = self.attempt
        max_output = attempt.sampling.max_gen_length - attempt.num_delivered
        length = self.length + sum(map(len, self.parts[self.covered :]))
        if not length:
            raise InvalidRequest("the prompt is empty")
        if attempt.tokenizer is not None:
            limit = attempt.engine.max_len
            prompt_len = length - len(attempt.resumed)
            is_cut = max_output > limit - length and not attempt.is_longest
            if prompt_len >= limit or is_cut:
                message = f"the prompt has {prompt_len} tokens; the limit is {limit - 1}"
                raise CountedPromptTooLong(message, prompt_len, limit)
            max_output = min(max_output, limit - length)
        max_output = max(0, max_output)
        if max_output and max_output != attempt.sampling.max_gen_length:
            attempt.sampling = attempt.sampling.model_copy(update={"max_gen_length": max_output})
        return max_output

    def open_constant_prefix(self) -> None:
        """Open a context of the tenant with the prompt's constant prefix.

        No effect if `parent` holds the constant prefix, or if the prefix is shorter than a block or
        than the public prefix."""
        task = self.attempt.task
        options, num_constant = task.completion.options, task.num_constant
        if not options.cache_prefix or num_constant <= self.covered:
            return
        length = self.length + sum(map(len, self.parts[self.covered : num_constant]))
        if length >= max(self.attempt.engine.info.block_size, self.public_len):
            self.open_context(options.tenant, num_constant)

    def open_context(
        self,
        owner: Owner,
        stop: int | None = None,
        *,
        reserved: int = 0,
        is_pinned: bool = False,
    ) -> LedgerContext:
        """Open a context that forks `parent` and holds the parts up to `stop`, by default all."""
        stop = len(self.parts) if stop is None else stop
        task, head = self.attempt.task, ""
        for segment in task.segments[self.covered : min(stop, self.covered + _MAX_HEAD_SEGMENTS)]:
            first = segment.parts[0] if segment.parts else segment
            head += first.text[: _MAX_HEAD - len(head)]
        units = join(self.parts[self.covered : stop])
        boundaries = self._boundaries(stop)
        if not units:
            # A context must be filled with a unit before an engine can generate on it.
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
            function=given_name(task.completion),
            tenant=task.tenant,
            head=head,
            is_pinned=is_pinned,
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
        """The boundaries of the parts up to `stop`. An empty part ends where its predecessor
        ends."""
        last, boundaries = self.last, []
        keys, parts = self.keys[self.covered : stop], self.parts[self.covered : stop]
        for key, end, part in zip(keys, self._ends(stop), parts, strict=True):
            last = part[-1] if part else last
            if end:
                boundaries.append(Boundary(key, end, last))
        return boundaries

    def _ends(self, stop: int) -> list[int]:
        """The lengths of the prompt at the ends of the uncovered parts up to `stop`."""
        sizes = map(len, self.parts[self.covered : stop])
        return list(accumulate(sizes, initial=self.length))[1:]
