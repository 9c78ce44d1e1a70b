"""Parrot's client: the program submits its graph and reads only what it wants to see."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from parrot.cli.bench.clients.waiting import first_of
from parrot.cli.bench.network import Network
from parrot.cli.bench.program import Call, Output, Program, Usage
from parrot.cli.bench.session import Data, Session, Var
from parrot.cli.bench.text import Text
from parrot.protocol.errors import SessionGone
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.serve_client import ServeClient


class GraphProgram(Program):
    """Calls are gathered until something is read, then submitted in two waves, whatever the depth
    of the graph: calls without producers together with the variables of the others' outputs, then
    the others, which name these variables.

    On a slow network the first wave is wanted at once, before its readers are known: the server
    then works during the second."""

    def __init__(
        self,
        client: ServeClient,
        network: Network,
        app: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
    ) -> None:
        """`api_key`: if ServeCore has some. `model`: where its calls run; None: on any."""
        super().__init__(asyncio.get_running_loop().time)
        self._client = client
        self._network = network
        self._app = app
        self._api_key = api_key
        self._models = [] if model is None else [model]
        self._opened: Session | None = None
        self._vars: dict[Output, Var] = {}
        self._new: list[Call] = []
        self._new_inputs: list[Output] = []

    @property
    def _session(self) -> Session:
        assert self._opened is not None
        return self._opened

    async def prepare(self) -> None:
        async with self._network.trip():
            self._opened = await Session.begin(self._client, self._app, self._api_key)

    async def set(self, output: Output, text: Text) -> None:
        await self._submit()
        async with self._network.trip():
            await self._session.set(self._vars[output], text.content)

    async def read(self, *outputs: Output) -> None:
        await self._submit()
        await asyncio.gather(*map(self._get, outputs))

    async def read_first(self, outputs: Sequence[Output], count: int) -> list[Output]:
        """A read that is cancelled withdraws what only it wanted."""
        await self._submit()
        reads = {asyncio.create_task(self._get(output)): output for output in outputs}
        first = await first_of(reads, count)
        await asyncio.gather(*reads, return_exceptions=True)
        return first

    async def end(self) -> None:
        if self._opened is not None:
            self.account.usages += await close_session(self._opened)

    def _add(self, call: Call) -> None:
        self._new.append(call)

    def _add_input(self, output: Output) -> None:
        self._new_inputs.append(output)

    async def _get(self, output: Output) -> None:
        var = self._vars[output]
        async with self._network.trip() as way_s:
            if output.call is None or not output.call.streamed:
                await self._session.read(var)
                return
            times = await self._session.stream(var)
        self.account.streams[output] = times.later(way_s)

    async def _submit(self) -> None:
        """Submit all calls made since the last time."""
        calls, self._new = self._new, []
        inputs, self._new_inputs = self._new_inputs, []
        if not calls and not inputs:
            return
        if self._opened is None:
            await self.prepare()
        known = set(self._vars)
        first = [call for call in calls if known.issuperset(call.inputs)]
        later = [call for call in calls if call not in first]
        wanted = {piece for call in calls for piece in call.inputs} - known
        variables = [call.output for call in later if call.output in wanted]
        await asyncio.gather(
            *(self._send(call, early=self._network.is_far and bool(later)) for call in first),
            *(self._create(output) for output in (*inputs, *variables)),
        )
        await asyncio.gather(*(self._send(call) for call in later))

    async def _create(self, output: Output) -> None:
        async with self._network.trip():
            self._vars[output] = await self._session.create(output.name)

    async def _send(self, call: Call, *, early: bool = False) -> None:
        output = self._vars.get(call.output)
        async with self._network.trip():
            self._vars[call.output] = await submit_call(
                self._session,
                call,
                self._vars,
                output=output,
                output_criteria=PerformanceCriteria.THROUGHPUT if early else None,
                models=self._models,
            )


async def submit_call(
    session: Session,
    call: Call,
    inputs: Mapping[Output, Var | Data],
    **options: Any,
) -> Var:
    """Constant texts stand in the template; data and outputs of other calls are its inputs.
    `options`: those of `Session.call`."""
    prompt = [
        inputs[piece]
        if isinstance(piece, Output)
        else Data(piece.content)
        if piece.is_data
        else piece.content
        for piece in call.prompt
    ]
    sampling = {
        "temperature": 0.0 if call.seed is None else 1.0,
        "seed": call.seed,
        "ignore_tokenizer_eos": call.stop is None,
        "stop_str": call.stop,
    }
    return await session.call(
        prompt,
        call.output.tokens,
        sampling=sampling,
        func_name=call.function,
        **options,
    )


async def close_session(session: Session) -> list[Usage]:
    """End a session; returns what its calls cost."""
    try:
        info = await session.info()
        await session.end()
    except SessionGone:
        return []
    return [
        Usage(
            call.cached_tokens + call.computed_tokens,
            call.output_tokens,
            call.cached_tokens,
            call.engine,
        )
        for call in info.calls
        if call.state == "done"
    ]
