"""Reads of all the answers of a turn at once."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from parrot.protocol.errors import ParrotError
from parrot.protocol.public import VarGetResponse
from parrot.serve.turns import Turn

_Delta = str | VarGetResponse
_MAX_AHEAD = 64  # deltas that wait for the client


async def read_all(turn: Turn) -> list[VarGetResponse]:
    """The answers, or the first error. What is not done when this ends is cancelled."""
    reads = [asyncio.ensure_future(turn.read(i)) for i in range(len(turn.completions))]
    try:
        return await asyncio.gather(*reads)
    finally:
        await _stop(reads)
        turn.cancel()


async def stream_all(turn: Turn) -> AsyncGenerator[tuple[int, _Delta]]:
    """The index of a choice with some more of its text, or with all of it at its end. Raises the
    first error. What is not done when this ends is cancelled."""
    deltas: asyncio.Queue[tuple[int, str | VarGetResponse | ParrotError]] = asyncio.Queue(
        _MAX_AHEAD
    )

    async def read(choice: int) -> None:
        try:
            async with aclosing(turn.stream(choice)) as stream:
                async for text in stream:
                    await deltas.put((choice, text))
            await deltas.put((choice, turn.ended(choice)))
        except ParrotError as error:
            await deltas.put((choice, error))

    num_open = len(turn.completions)
    reads = [asyncio.ensure_future(read(i)) for i in range(num_open)]
    try:
        while num_open:
            choice, delta = await deltas.get()
            if isinstance(delta, ParrotError):
                raise delta
            num_open -= isinstance(delta, VarGetResponse)
            yield choice, delta
    finally:
        await _stop(reads)
        turn.cancel()


async def _stop(reads: Sequence[asyncio.Future[Any]]) -> None:
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
