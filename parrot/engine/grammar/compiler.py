"""Compiling what constrains outputs, in threads, within limits."""

import asyncio
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import orjson
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from parrot.engine.grammar.constraint import Constraint, Vocabulary
from parrot.protocol.engine_api import TokenizerResponse
from parrot.protocol.errors import InvalidRequest, QuotaExceeded
from parrot.protocol.sampling import MAX_GRAMMAR, SamplingConfig
from parrot.utils.heaps import LruDict

logger = logging.getLogger(__name__)

MAX_DEPTH = 64
DEADLINE_S = 1.0
_NUM_THREADS = 2
_CACHE_BYTES = 64 * 2**20
_GRAMMAR_BYTES = 2**16  # of one, besides those that grow with its text
_BYTES_PER_CHARACTER = 64
_MAX_REASON = 300
_NO_EOS = "<|no end of text|>"


class _Compiled(NamedTuple):
    """`matcher` stands at the beginning, and is only copied."""

    matcher: LLMatcher
    num_bytes: int


class GrammarCompiler:
    """Makes constraints for one tokenizer, and remembers grammars. Used from one event loop.

    llguidance bounds a grammar's states and steps itself; what it has not compiled after
    `deadline_s` is refused, and its thread left to end."""

    def __init__(
        self, tokenizer: LLTokenizer, eos: Sequence[int], *, deadline_s: float = DEADLINE_S
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary((tokenizer.vocab_size + 31) // 32, eos, LLExecutor())
        self._deadline_s = deadline_s
        self._limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._cache: LruDict[str, _Compiled] = LruDict(
            _CACHE_BYTES, weigh=lambda compiled: compiled.num_bytes
        )

    @classmethod
    def of(cls, response: TokenizerResponse, vocab_size: int) -> "GrammarCompiler | None":
        """For a model with logits of `vocab_size`; takes a second for a large vocabulary, in which
        no other Python runs. None if the bytes of the tokenizer's tokens are not known."""
        text, eos = response.tokenizer_json, response.special_ids.eos
        if not eos:  # a token that the tokenizer does not have stands for it
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
        """For one output, of which `resumed_ids` are there already; None if it is free. Waits for
        nothing if the grammar is remembered. Raises `InvalidRequest` naming the field for a grammar
        that is wrong, not supported, or too much work."""
        field = sampling.constraint
        if field is None:
            return None
        try:
            text = _grammar(field, getattr(sampling, field))
        except (TypeError, ValueError, RecursionError) as error:
            raise _wrong(field, str(error)) from None
        compiled = self._cache.get(text)
        if compiled is None:
            compiled = await self._compile(field, text)
            self._cache.put(text, compiled)
        matcher = compiled.matcher.deep_copy()
        may_end_early = not sampling.ignore_tokenizer_eos
        constraint = Constraint(matcher, field, self._vocabulary, may_end_early=may_end_early)
        if resumed_ids:
            constraint.resume(resumed_ids)
        return constraint

    async def _compile(self, field: str, text: str) -> _Compiled:
        work = self._threads.submit(self._make, field, text)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await asyncio.wrap_future(work)
        except TimeoutError:
            if work.cancel():
                raise QuotaExceeded("the engine is compiling too many grammars") from None
            seconds = f"{self._deadline_s:g} s"
            raise _wrong(field, f"it takes more than {seconds} to compile") from None

    def _make(self, field: str, text: str) -> _Compiled:
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _wrong(field, matcher.get_error())
        return _Compiled(matcher, _GRAMMAR_BYTES + _BYTES_PER_CHARACTER * len(text))


def _wrong(field: str, reason: str) -> InvalidRequest:
    text = f"`{field}` cannot constrain an output: {reason[:_MAX_REASON]}"
    return InvalidRequest(text, param=field)


def _grammar(field: str, wanted: Any) -> str:
    """llguidance's own form of a field's value. Raises `ValueError`."""
    if field == "json_schema":
        return LLMatcher.grammar_from_json_schema(_checked_schema(wanted))
    if field == "regex":
        return LLMatcher.grammar_from_regex(_within_size(wanted))
    if field == "choices":
        wanted = "start: " + " | ".join(map(_literal, wanted))
    return LLMatcher.grammar_from_lark(_within_size(wanted))


def _literal(text: str) -> str:
    """A string of a Lark grammar, which may contain no control character."""
    return "".join(
        rf"\u{ord(c):04x}" if "\x7f" <= c <= "\x9f" else c
        for c in json.dumps(text, ensure_ascii=False)
    )


def _within_size(text: str) -> str:
    if len(text.encode()) > MAX_GRAMMAR:
        raise ValueError(f"it has more than {MAX_GRAMMAR} bytes")
    return text


def _checked_schema(schema: dict[str, Any] | str) -> str:
    if isinstance(schema, str):
        schema = orjson.loads(_within_size(schema))
        if not isinstance(schema, dict):
            raise ValueError("a JSON schema is an object")
    level: list[Any] = [schema]
    num_values = 0
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return _within_size(json.dumps(schema, ensure_ascii=False))
        num_values += len(level)
        if num_values > MAX_GRAMMAR:
            raise ValueError(f"it has more than {MAX_GRAMMAR} bytes")
        level = [inner for value in level for inner in _inner(value)]
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _inner(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()
