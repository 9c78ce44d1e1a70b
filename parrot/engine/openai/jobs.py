"""The openai engine's account of one request."""

import asyncio
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from parrot.engine.openai.contexts import Turn
from parrot.engine.openai.wire import WireUsage
from parrot.protocol.engine_api import StreamChunk, Usage
from parrot.protocol.errors import ParrotError

R = TypeVar("R")


@dataclass(eq=False)
class Job(Generic[R]):
    """One request. `error` is why it was aborted, if it was; None in `chunks` is their end."""

    turns: dict[int, Turn]
    chunks: "asyncio.Queue[StreamChunk | None]"
    task: "asyncio.Task[R]" = field(init=False)
    error: ParrotError | None = None

    async def result(self) -> R:
        try:
            return await self.task
        except asyncio.CancelledError:
            if self.error is not None:
                raise self.error from None
            raise


@dataclass(slots=True)
class Times:
    """Stamps of one Generate, in the clock's seconds."""

    submitted: float
    started: float
    first_text: float

    def usage(self, counted: WireUsage | None, now: float) -> Usage:
        """An unstreamed answer comes all at once: its prefill is part of `decode_s`."""
        counted = counted or WireUsage()
        return Usage(
            cached_tokens=counted.cached_tokens,
            computed_tokens=counted.prompt_tokens - counted.cached_tokens,
            output_tokens=counted.completion_tokens,
            queue_s=self.started - self.submitted,
            prefill_s=self.first_text - self.started,
            decode_s=now - self.first_text,
        )
