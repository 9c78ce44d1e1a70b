"""Answers as typed parts, which each API converts into its own format.

    "I will look.\\n<tool_call>..."    Likelihoods? TextDelta* ReasoningDelta* ToolCall* ... Ended

Text, reasoning and tool calls are emitted as the parser finds them. If log probabilities are
requested, they come before the text of their tokens. The last part contains the whole answer."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from parrot.gateway.answers import AnswerParser, ParsedToolCall, ReasoningDelta, TextDelta
from parrot.gateway.turns import Turn
from parrot.gateway.vendors.logprobs import Entry, LogprobsReader, entries_of
from parrot.protocol.errors import ParrotError
from parrot.protocol.public import VarGetResponse
from parrot.serve.readers import ScoredToken

_Delta = str | VarGetResponse
_MAX_AHEAD = 64  # Deltas that are buffered for a slow client. More make the readers wait.


class AnswerEnd(NamedTuple):
    value: VarGetResponse
    at: int  # Unix time in seconds


class Likelihoods(NamedTuple):
    """Log probabilities of the answer's next tokens."""

    entries: list[Entry]


Part = TextDelta | ReasoningDelta | ParsedToolCall | Likelihoods | AnswerEnd
"""A part of an answer, or its end."""


async def whole_parts(
    turn: Turn, choice: int, value: VarGetResponse, parser: AnswerParser
) -> list[Part]:
    """All parts of a finished answer."""
    parts: list[Part] = []
    if turn.is_scored(choice):
        parts = await _likelihoods(await LogprobsReader(turn, choice).rest())
    return [*parts, *parser.feed(value.content), *parser.finish(), _ended(value)]


async def stream_parts(
    turn: Turn, parsers: Sequence[AnswerParser]
) -> AsyncGenerator[tuple[int, list[Part]]]:
    """Yield the index of an answer with its next parts; no parts while its parser holds text back.
    `parsers` has one for each answer. Raises the first error. Unfinished answers are cancelled when
    the generator closes."""
    if len(parsers) == 1 and not turn.is_scored(0):
        try:
            async with aclosing(turn.stream(0)) as texts:
                async for text in texts:
                    yield 0, list(parsers[0].feed(text))
            yield 0, [*parsers[0].finish(), _ended(turn.ended(0))]
        finally:
            turn.cancel()
        return
    taken = [LogprobsReader(turn, i) if turn.is_scored(i) else None for i in range(len(parsers))]
    async with aclosing(stream_all([turn])) as deltas:
        async for i, delta in deltas:
            parser, logprobs = parsers[i], taken[i]
            if isinstance(delta, VarGetResponse):
                rest = [] if logprobs is None else await _likelihoods(await logprobs.rest())
                yield i, [*rest, *parser.finish(), _ended(delta)]
            elif logprobs is None:
                yield i, list(parser.feed(delta))
            else:
                for text, scored in await logprobs.pieces(delta):
                    yield i, [*await _likelihoods(scored), *parser.feed(text)]


async def _likelihoods(scored: Sequence[ScoredToken]) -> list[Part]:
    return [Likelihoods(await entries_of(scored))] if scored else []


def _ended(value: VarGetResponse) -> AnswerEnd:
    return AnswerEnd(value, int(time.time()))


async def read_all(turns: Sequence[Turn]) -> list[VarGetResponse]:
    """All answers. Raises the first error. Unfinished answers are cancelled after an error, or if
    the caller is cancelled."""
    reads = [asyncio.ensure_future(turn.read(i)) for turn, i in _choices(turns)]
    try:
        return await asyncio.gather(*reads)
    finally:
        await _stop(reads, turns)


async def stream_all(turns: Sequence[Turn]) -> AsyncGenerator[tuple[int, _Delta]]:
    """Yield the index of an answer with its next text, and at its end with the whole answer. Raises
    the first error. With a journal, the end or error is on disk first. Unfinished answers are
    cancelled when the generator closes."""
    choices = _choices(turns)
    if len(choices) == 1:
        ((turn, choice),) = choices
        try:
            async with aclosing(turn.stream(choice)) as stream:
                async for text in stream:
                    yield 0, text
            yield 0, turn.ended(choice)
        finally:
            turn.cancel()
        return
    deltas: asyncio.Queue[tuple[int, str | VarGetResponse | ParrotError]] = asyncio.Queue(
        _MAX_AHEAD
    )

    async def read(index: int, turn: Turn, choice: int) -> None:
        try:
            async with aclosing(turn.stream(choice)) as stream:
                async for text in stream:
                    await deltas.put((index, text))
            await deltas.put((index, turn.ended(choice)))
        except ParrotError as error:
            await deltas.put((index, error))

    reads = [asyncio.ensure_future(read(i, *choice)) for i, choice in enumerate(choices)]
    num_open = len(reads)
    try:
        while num_open:
            index, delta = await deltas.get()
            if isinstance(delta, ParrotError):
                raise delta
            num_open -= isinstance(delta, VarGetResponse)
            yield index, delta
    finally:
        await _stop(reads, turns)


def _choices(turns: Sequence[Turn]) -> list[tuple[Turn, int]]:
    return [(turn, i) for turn in turns for i in range(len(turn.completions))]


async def _stop(reads: Sequence[asyncio.Future[Any]], turns: Sequence[Turn]) -> None:
    for turn in turns:
        turn.cancel()
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
