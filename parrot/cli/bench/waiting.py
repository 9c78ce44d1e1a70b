"""The style of most programs today: each call waits for its inputs and sends a whole prompt."""

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from parrot.cli.bench.program import Program, ProgramCall, ProgramOutput
from parrot.cli.bench.text import PromptText


async def first_of(
    tasks: Mapping[asyncio.Task[Any], ProgramOutput], count: int
) -> list[ProgramOutput]:
    """Wait for `count` tasks and cancel the others. Returns the outputs in the order in which the
    tasks end. Raises the exception of a task that failed."""
    left = dict(tasks)
    first: list[ProgramOutput] = []
    while len(first) < count:
        done, _ = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
            first.append(left.pop(task))
    for task in left:
        task.cancel()
    return first[:count]


class WaitingProgram(Program):
    """Subclasses send one request. Requests of different calls run in parallel."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(self._loop.time)
        self._tasks: dict[ProgramOutput, asyncio.Task[str]] = {}
        self._inputs: dict[ProgramOutput, asyncio.Future[str]] = {}

    @abstractmethod
    async def _complete(self, call: ProgramCall, texts: Sequence[str]) -> str:
        """Send one request. `texts` are the pieces of the prompt. Records the usage, and the times
        of a streamed call. Cancelling it ends the request."""

    async def set(self, output: ProgramOutput, text: PromptText) -> None:
        self._inputs[output].set_result(text.content)

    async def read(self, *outputs: ProgramOutput) -> None:
        await asyncio.gather(*(self._tasks[output] for output in outputs))

    async def read_first(self, outputs: Sequence[ProgramOutput], count: int) -> list[ProgramOutput]:
        return await first_of({self._tasks[output]: output for output in outputs}, count)

    async def end(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _add(self, call: ProgramCall) -> None:
        self._tasks[call.output] = self._loop.create_task(self._run(call))

    def _add_input(self, output: ProgramOutput) -> None:
        self._inputs[output] = self._loop.create_future()

    async def _run(self, call: ProgramCall) -> str:
        texts = [
            piece.content if isinstance(piece, PromptText) else await self._value(piece)
            for piece in call.prompt
        ]
        return await self._complete(call, texts)

    async def _value(self, output: ProgramOutput) -> str:
        waiting = self._inputs[output] if output.call is None else self._tasks[output]
        return await asyncio.shield(waiting)
