"""An output's tokens with their log probabilities, one by one."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

from parrot.protocol.sampling import LikelyToken, Logprobs, TokenLogprob

SLICE = 64  # tokens that are looked at at once, within a few milliseconds


class ScoredToken(NamedTuple):
    """A token, its log probability, and the most likely tokens in its place."""

    token: bytes
    logprob: float
    likely: Sequence[tuple[bytes, float]]


async def scored_tokens(found: Logprobs, start: int = 0) -> AsyncIterator[ScoredToken]:
    """Yield the tokens from `start` on, those that are there now. Now and then others may run."""
    stop = len(found)
    for first in range(start, stop, SLICE):
        if first > start:
            await asyncio.sleep(0)
        for scored in _scored(found, first, min(first + SLICE, stop)):
            yield scored


async def logprobs_view(found: Logprobs) -> list[TokenLogprob] | None:
    """The tokens as programs read them."""
    if found.tokens is None:
        return None
    return [
        TokenLogprob(
            token=scored.token.decode(errors="replace"),
            logprob=scored.logprob,
            bytes=list(scored.token),
            top_logprobs=[
                LikelyToken(
                    token=token.decode(errors="replace"), logprob=logprob, bytes=list(token)
                )
                for token, logprob in scored.likely
            ],
        )
        async for scored in scored_tokens(found)
    ]


def _scored(found: Logprobs, start: int, stop: int) -> Iterator[ScoredToken]:
    width, tokens = found.width, found.tokens
    assert tokens is not None, "the bytes of the tokens are unknown"
    for first in range(start * width, stop * width, width):
        row = [
            (tokens[found.ids[at]], found.values[at])
            for at in range(first, first + width)
            if found.ids[at] >= 0
        ]
        (token, logprob), *likely = row
        yield ScoredToken(token, logprob, likely)
