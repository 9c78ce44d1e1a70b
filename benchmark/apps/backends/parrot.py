"""Parrot's client: the program submits its graph and reads only what it wants to see."""

import asyncio
from collections.abc import Mapping, Sequence

from benchmark.apps.backends.waiting import WaitingProgram, first_of
from benchmark.apps.counters import Scrape
from benchmark.apps.network import Network
from benchmark.apps.program import Backend, Call, Output, Program, StreamTimes, Usage
from benchmark.apps.text import Text
from benchmark.session import Data, Session, Var
from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.errors import SessionGone
from parrot.protocol.serve_client import ServeClient


def parrot_backend(
    client: ServeClient, scrape: Scrape, network: Network, *, whole_graph: bool
) -> Backend:
    """`whole_graph`: programs submit their graphs; otherwise one request after the other."""
    kind = GraphProgram if whole_graph else RequestProgram
    return Backend(lambda app: kind(client, network, app), scrape, client.close)


class GraphProgram(Program):
    """Calls are gathered until something is read, then submitted in two waves, whatever the depth
    of the graph: calls without producers together with the variables of the others' outputs, then
    the others, which name these variables.

    On a slow network the first wave is wanted at once, before its readers are known: the server
    then works during the second."""

    def __init__(self, client: ServeClient, network: Network, app: str) -> None:
        super().__init__(asyncio.get_running_loop().time)
        self._client = client
        self._network = network
        self._app = app
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
            self._opened = await Session.begin(self._client, self._app)

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

    async def stream(self, output: Output) -> StreamTimes:
        await self._submit()
        async with self._network.trip() as way_s:
            times = StreamTimes(*await self._session.stream(self._vars[output]))
        return times.later(way_s)

    async def end(self) -> None:
        if self._opened is not None:
            self.account.usages += await _close(self._opened)

    def _add(self, call: Call) -> None:
        self._new.append(call)

    def _add_input(self, output: Output) -> None:
        self._new_inputs.append(output)

    async def _get(self, output: Output) -> None:
        async with self._network.trip():
            await self._session.read(self._vars[output])

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
            self._vars[call.output] = await _submit(self._session, call, self._vars, output, early)


class RequestProgram(WaitingProgram):
    """ServeCore as a server of single requests: each call is a session of its own, so nothing of
    the graph is known. What an OpenAI client costs, one round trip, is what it costs here."""

    def __init__(self, client: ServeClient, network: Network, app: str) -> None:
        super().__init__()
        self._client = client
        self._network = network
        self._app = app
        self._releases: list[asyncio.Task[None]] = []

    async def _complete(self, call: Call, texts: Sequence[str]) -> str:
        inputs = {
            piece: Data(text)
            for piece, text in zip(call.prompt, texts, strict=True)
            if isinstance(piece, Output)
        }
        async with self._network.trip() as way_s:
            session = await Session.begin(self._client, self._app)
            try:
                var = await _submit(session, call, inputs)
                if call.streamed:
                    times = StreamTimes(*await session.stream(var))
                    self._streams[call.output] = times.later(way_s)
                return await session.read(var)
            finally:
                self._releases.append(self._loop.create_task(self._release(session)))

    async def end(self) -> None:
        await super().end()
        await asyncio.gather(*self._releases)

    async def _release(self, session: Session) -> None:
        self.account.usages += await _close(session)


async def _submit(
    session: Session,
    call: Call,
    inputs: Mapping[Output, Var | Data],
    output: Var | None = None,
    early: bool = False,
) -> Var:
    """Constant texts stand in the template; data and outputs of other calls are its inputs."""
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
        output=output,
        func_name=call.function,
        output_criteria=PerformanceCriteria.THROUGHPUT if early else None,
    )


async def _close(session: Session) -> list[Usage]:
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
