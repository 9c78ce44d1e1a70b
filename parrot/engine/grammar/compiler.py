"""Compiles grammars that constrain outputs, in threads and within limits."""

import asyncio
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from weakref import WeakSet

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from parrot.engine.grammar.constraint import Constraint, Vocabulary
from parrot.protocol.engine_api import TokenizerResponse
from parrot.protocol.errors import InvalidRequest, ParrotError, QuotaExceeded
from parrot.protocol.sampling import MAX_GRAMMAR, SamplingConfig
from parrot.utils.heaps import LruDict
from parrot.utils.json_schemas import check_size, exact_schema

logger = logging.getLogger(__name__)

DEADLINE_S = 2.0  # A grammar that takes longer to compile, in seconds, is rejected.
_NUM_THREADS = 2  # Threads that compile grammars.
_MASK_THREADS = max(1, min(32, (os.cpu_count() or 1) * 4 // 5))  # Threads that compute masks.
# Largest number of states of a lexer. At this size a lexer takes up to 8 MiB, its grammar 4 MiB.
_MAX_STATES = 16_000
# Largest number of Earley items in a parser row, for Lark grammars. Each reading of an ambiguous
# text is an item, and a step compares pairs: 500 items take milliseconds, 2,000 take 0.2 s.
_MAX_ITEMS = 500
_MAX_LEXERS = 128  # Largest number of cached lexers. More lexers take more memory.
_MAX_REASON = 300  # Error messages quote at most this many characters of llguidance's reason.
_NO_EOS = "<|no end of text|>"  # Added to tokenizers without an end-of-text token.
_QUICK_S = 0.05  # A grammar that compiles within this time, in seconds, may get several lexers.


class _Lexer(NamedTuple):
    """One compilation of a grammar. Copies of `matcher` share its lexer states and their lock."""

    matcher: LLMatcher  # At the start of the text. It is copied and never advanced.
    users: WeakSet[Constraint]  # Live constraints that use a copy of `matcher`.
    compile_s: float


class _Grammar(NamedTuple):
    """A grammar with one or more lexers, so that concurrent outputs do not share a lock."""

    lexers: tuple[_Lexer, ...]

    def least_used(self) -> _Lexer:
        return min(self.lexers, key=lambda lexer: len(lexer.users))


class GrammarCompiler:
    """Makes constraints for one tokenizer and caches compiled grammars. Used from one event loop.

    Limits on time, parser items, lexer states and cached lexers keep hostile grammars from blocking
    a batch or filling the memory. An output that exceeds a limit fails."""

    def __init__(
        self,
        tokenizer: LLTokenizer,
        eos: Sequence[int],
        *,
        deadline_s: float = DEADLINE_S,
        mask_threads: int = _MASK_THREADS,
    ) -> None:
        self._tokenizer = tokenizer
        num_words = (tokenizer.vocab_size + 31) // 32
        self._vocabulary = Vocabulary(num_words, eos, LLExecutor(mask_threads))
        self._deadline_s = deadline_s
        self._max_lexers = mask_threads  # Per grammar: more lexers cannot compute in parallel.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._cache: LruDict[tuple[str, str], _Grammar] = LruDict(
            _MAX_LEXERS, weigh=lambda grammar: len(grammar.lexers)
        )
        self._num_compiling: Counter[tuple[str, str]] = Counter()

    @classmethod
    def of(cls, response: TokenizerResponse, vocab_size: int) -> "GrammarCompiler | None":
        """Make the compiler for a model whose logits have `vocab_size` columns.

        None if llguidance cannot read the tokenizer. With a large vocabulary the call holds the GIL
        for about 1 s."""
        text, eos = response.tokenizer_json, response.special_ids.eos
        if not eos:  # llguidance needs an end-of-text token.
            extended = Tokenizer.from_str(text)
            eos = [extended.get_vocab_size()]
            extended.add_special_tokens([_NO_EOS])
            text = extended.to_str()
        try:
            tokenizer = LLTokenizer(text, n_vocab=max(vocab_size, 1 + max(eos)), eos_token=[*eos])
        except ValueError as error:
            logger.warning("outputs cannot be constrained with this tokenizer: %s", error)
            return None
        return cls(tokenizer, eos)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def constraint(
        self, sampling: SamplingConfig, resumed_ids: Sequence[int] = ()
    ) -> Constraint | None:
        """The constraint of one output that starts with `resumed_ids`; None without a grammar.

        Returns without waiting if a lexer of the grammar is cached and unused. Raises
        `InvalidRequest` for a grammar that is invalid, not supported or too expensive."""
        field = sampling.constraint
        if field is None:
            return None
        try:
            text = _text(field, getattr(sampling, field))
        except (TypeError, ValueError, RecursionError) as error:
            raise _wrong(field, str(error)) from None
        lexer = await self._lexer(field, text)
        may_end_early = not sampling.ignore_tokenizer_eos
        constraint = Constraint(
            lexer.matcher.deep_copy(),
            field,
            self._vocabulary,
            may_end_early=may_end_early,
            lexer_id=id(lexer),
        )
        lexer.users.add(constraint)
        if resumed_ids:
            constraint.resume(resumed_ids)
        return constraint

    async def _lexer(self, field: str, text: str) -> _Lexer:
        """An unused lexer if one exists or can be compiled in 0.1 s, else the least used lexer."""
        known = self._cache.get((field, text))
        if known is None:
            return await self._another(field, text, self._deadline_s)
        least = known.least_used()
        if least.users and self._has_room(known, self._num_compiling[field, text]):
            try:
                return await self._another(field, text, 2 * _QUICK_S)
            except ParrotError:  # The threads are busy, or compiling takes longer than usual.
                return known.least_used()
        return least

    def _has_room(self, grammar: _Grammar, num_compiling: int = 0) -> bool:
        """Whether the grammar may get one more lexer."""
        num_lexers = len(grammar.lexers) + num_compiling
        is_quick = grammar.lexers[0].compile_s <= _QUICK_S
        return is_quick and num_lexers < min(self._max_lexers, _MAX_LEXERS // 8)

    async def _another(self, field: str, text: str, deadline_s: float) -> _Lexer:
        """Compile a lexer and cache it. Raises `InvalidRequest` and `QuotaExceeded`."""
        key = (field, text)
        self._num_compiling[key] += 1
        try:
            made = await self._compile(field, text, deadline_s)
        finally:
            self._num_compiling[key] -= 1
            if not self._num_compiling[key]:
                del self._num_compiling[key]
        known = self._cache.get(key)
        if known is None:
            self._cache.put(key, _Grammar((made,)))
        elif self._has_room(known):
            self._cache.put(key, _Grammar((*known.lexers, made)))
        return made

    async def _compile(self, field: str, text: str, deadline_s: float) -> _Lexer:
        work = self._threads.submit(self._make, field, text)
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.wrap_future(work)
        except TimeoutError:
            if work.cancel():
                raise QuotaExceeded("the engine is compiling too many grammars") from None
            seconds = f"{deadline_s:g} s"
            raise _wrong(field, f"it takes more than {seconds} to compile") from None

    def _make(self, field: str, text: str) -> _Lexer:
        began = time.perf_counter()
        try:
            grammar = _grammar(field, text)
        except (ValueError, RecursionError) as error:
            raise _wrong(field, str(error)) from None
        is_free = field == "grammar"
        limits = LLParserLimits(
            max_items_in_row=_MAX_ITEMS if is_free else None,
            step_max_items=20 * _MAX_ITEMS if is_free else None,
            max_lexer_states=_MAX_STATES,
            verbose_errors=False,
        )
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        # The first mask takes longest, so this thread computes it. An empty mask means that no text
        # matches the grammar.
        if matcher.is_error() or not any(matcher.compute_bitmask()) or matcher.is_stopped():
            raise _wrong(field, matcher.get_error() or "no text matches it")
        return _Lexer(matcher, WeakSet(), time.perf_counter() - began)


def _wrong(field: str, reason: str) -> InvalidRequest:
    text = f"`{field}` cannot constrain an output: {reason[:_MAX_REASON]}"
    return InvalidRequest(text, param=field)


def _text(field: str, wanted: Any) -> str:
    """The field's value as text of at most `MAX_GRAMMAR` bytes. Raises `ValueError`."""
    if field == "json_schema":
        if isinstance(wanted, str):
            wanted = json.loads(_within_size(wanted))
        if not isinstance(wanted, dict):
            raise ValueError("a JSON schema must be an object")
        check_size(wanted, MAX_GRAMMAR)
        wanted = json.dumps(wanted, ensure_ascii=False)
    elif field == "choices":
        wanted = "start: " + " | ".join(map(_literal, wanted))
    return _within_size(wanted)


def _grammar(field: str, text: str) -> str:
    """Convert a field's text to llguidance's format. Raises `ValueError`."""
    if field == "json_schema":
        schema = exact_schema(json.loads(text), MAX_GRAMMAR)
        return LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False))
    if field == "regex":
        return LLMatcher.grammar_from_regex(text)
    return LLMatcher.grammar_from_lark(text)


def _literal(text: str) -> str:
    """A string literal of a Lark grammar, with control characters escaped."""
    return "".join(
        rf"\u{ord(c):04x}" if "\x7f" <= c <= "\x9f" else c
        for c in json.dumps(text, ensure_ascii=False)
    )


def _within_size(text: str) -> str:
    if len(text.encode()) > MAX_GRAMMAR:
        raise ValueError(f"it has more than {MAX_GRAMMAR} bytes")
    return text
