"""Reads of all the answers of some turns at once."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from parrot.gateway.conversations.turn import Turn
from parrot.protocol.errors import ParrotError
from parrot.protocol.public import VarGetResponse

_Delta = str | VarGetResponse
_MAX_AHEAD = 64  # deltas that wait for the client


async def read_all(turns: Sequence[Turn]) -> list[VarGetResponse]:
    """The answers, or the first error. What is not done when this ends is cancelled."""
    reads = [asyncio.ensure_future(turn.read(i)) for turn, i in _choices(turns)]
    try:
        return await asyncio.gather(*reads)
    finally:
        await _stop(reads, turns)


async def stream_all(turns: Sequence[Turn]) -> AsyncGenerator[tuple[int, _Delta]]:
    """The index of an answer with some more of its text, or with all of it at its end. Raises the
    first error. An answer's end, good or bad, is told when it is on disk, if it is written down.
    What is not done when this ends is cancelled."""
    choices = _choices(turns)
    if len(choices) == 1:
        ((turn, choice),) = choices
        try:
            async with turn.session.published(), aclosing(turn.stream(choice)) as stream:
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
            async with turn.session.published(), aclosing(turn.stream(choice)) as stream:
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
