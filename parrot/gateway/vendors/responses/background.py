"""Responses that are made though nobody waits for them, and can be followed by who comes later."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

import orjson

from parrot.gateway.conversations.turn import Turn
from parrot.gateway.prompts.answers import AnswerParser, TextDelta
from parrot.gateway.vendors.choices import stream_all
from parrot.gateway.vendors.openai_common import Json
from parrot.gateway.vendors.responses.writer import Ended, Likelihoods, Part, ResponseWriter
from parrot.gateway.vendors.token_logprobs import AnswerLogprobs, entries_of
from parrot.protocol.answers import Events
from parrot.protocol.errors import Cancelled, InsufficientStorage, NoEngine, NotFound, ParrotError
from parrot.serve.graph.nodes import CompletionState

T = TypeVar("T")

_MAX_SKIPPED = 256  # events that are passed over at once


async def answer_parts(turn: Turn, parser: AnswerParser) -> AsyncGenerator[Part]:
    """An answer as it comes, beginning with an empty text. Raises its error. What is not done when
    this ends is cancelled."""
    has_begun = False
    logprobs = AnswerLogprobs(turn, 0)
    async with aclosing(stream_all([turn])) as deltas:
        async for _, delta in deltas:
            if not has_begun:
                has_begun = True
                yield TextDelta("")
            if isinstance(delta, str):
                for text, scored in await logprobs.pieces(delta):
                    if scored:
                        yield Likelihoods(await entries_of(scored))
                    for event in parser.feed(text):
                        yield event
                continue
            if rest := await logprobs.rest():
                yield Likelihoods(await entries_of(rest))
            for event in parser.finish():
                yield event
            yield Ended(delta, int(time.time()))


async def likelihoods(turn: Turn) -> Likelihoods:
    """How likely all tokens of an answer were that is there; empty unless that is wanted."""
    return Likelihoods(await entries_of(await AnswerLogprobs(turn, 0).rest()))


async def when_served(
    submit: Callable[[], T],
    joined: Callable[[], Awaitable[None]],
    has_room: Callable[[], Awaitable[None]],
    timeout_s: float,
) -> T:
    """Submit as soon as engines with the model are there and the journal can be written; `joined`
    waits for the next engine, and `has_room` for the journal, however long that takes. Raises what
    `submit` does otherwise, and after `timeout_s` that there is no engine."""
    while True:
        try:
            return await _when_served(submit, joined, timeout_s)
        except InsufficientStorage:
            await has_room()


async def _when_served(
    submit: Callable[[], T], joined: Callable[[], Awaitable[None]], timeout_s: float
) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return submit()
                except (NoEngine, NotFound):
                    await joined()
    except TimeoutError:
        return submit()


class Background:
    """The state of one response so far. `writer` has the response as it is now. `turn`: None if it
    is submitted later. `published` waits until what was made is on disk."""

    def __init__(
        self, turn: Turn | None, frame: Json, published: Callable[[], Awaitable[None]]
    ) -> None:
        self.writer = ResponseWriter(frame)
        self.turn = turn
        self.frame = frame
        self.has_ended = False
        self._published = published
        self._parts: list[Part] = []
        self._changed = asyncio.Event()

    @property
    def num_parts(self) -> int:
        return len(self._parts)

    def body(self) -> bytes:
        """The response as it is now."""
        response = self.writer.response
        turn = None if self.has_ended else self.turn
        if turn is not None and turn.completions[0].state is CompletionState.RUNNING:
            response = response | {"status": "in_progress"}
        return orjson.dumps(response)

    def add(self, part: Part) -> None:
        """Nothing happens if it has ended."""
        if self.has_ended:
            return
        for _ in self.writer.write(part):
            pass
        self._parts.append(part)
        if isinstance(part, Ended | ParrotError):
            self.has_ended = True
        self._changed.set()
        self._changed = asyncio.Event()

    def cancel(self) -> None:
        """Nothing happens if it has ended."""
        if self.has_ended:
            return
        self.add(Cancelled("the response was cancelled"))
        if self.turn is not None:
            self.turn.cancel()

    async def events(self, after: int = -1) -> AsyncGenerator[Events]:
        """All events whose numbers are larger than `after`, until it has ended. The end is told
        when it is on disk: until then a restart may make another answer."""
        writer = ResponseWriter(self.frame)
        num_written = 0
        events = list(writer.begin())
        while True:
            yield [(e["type"], e) for e in events if e["sequence_number"] > after]
            if num_written % _MAX_SKIPPED == 0:
                await asyncio.sleep(0)
            while num_written == len(self._parts):
                if self.has_ended:
                    return
                await self._changed.wait()
            events = list(writer.write(self._parts[num_written]))
            num_written += 1
            if self.has_ended and num_written == len(self._parts):
                await self._published()
