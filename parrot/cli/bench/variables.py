"""The style of a Parrot program: it submits its graph of semantic variables and reads the outputs
that it needs."""

import asyncio
from collections.abc import Sequence

from parrot.cli.bench.program import Network, Program, ProgramCall, ProgramOutput
from parrot.cli.bench.sessions import BenchSession, Var, close_session, submit_call
from parrot.cli.bench.text import PromptText
from parrot.cli.bench.waiting import first_of
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.serve_client import ServeClient


class GraphProgram(Program):
    """Collects calls until the program reads an output, then submits them in two waves. The first
    wave is the calls without producers, and variables for the outputs of the other calls. The
    second wave is the other calls. On a slow network the outputs of the first wave are requested at
    once, so that the server works during the second wave."""

    def __init__(
        self,
        client: ServeClient,
        network: Network,
        app: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
    ) -> None:
        """`model`: the model of all calls; None: any model."""
        super().__init__(asyncio.get_running_loop().time)
        self._client = client
        self._network = network
        self._app = app
        self._api_key = api_key
        self._models = [] if model is None else [model]
        self._opened: BenchSession | None = None
        self._vars: dict[ProgramOutput, Var] = {}
        self._new: list[ProgramCall] = []
        self._new_inputs: list[ProgramOutput] = []

    @property
    def _session(self) -> BenchSession:
        assert self._opened is not None
        return self._opened

    async def prepare(self) -> None:
        async with self._network.trip():
            self._opened = await BenchSession.begin(self._client, self._app, self._api_key)

    async def set(self, output: ProgramOutput, text: PromptText) -> None:
        await self._submit()
        async with self._network.trip():
            await self._session.set(self._vars[output], text.content)

    async def read(self, *outputs: ProgramOutput) -> None:
        await self._submit()
        await asyncio.gather(*map(self._get, outputs))

    async def read_first(self, outputs: Sequence[ProgramOutput], count: int) -> list[ProgramOutput]:
        """Cancelling a read cancels the calls that have no other reader."""
        await self._submit()
        reads = {asyncio.create_task(self._get(output)): output for output in outputs}
        first = await first_of(reads, count)
        await asyncio.gather(*reads, return_exceptions=True)
        return first

    async def end(self) -> None:
        if self._opened is not None:
            self.account.usages += await close_session(self._opened)

    def _add(self, call: ProgramCall) -> None:
        self._new.append(call)

    def _add_input(self, output: ProgramOutput) -> None:
        self._new_inputs.append(output)

    async def _get(self, output: ProgramOutput) -> None:
        var = self._vars[output]
        async with self._network.trip() as way_s:
            if output.call is None or not output.call.streamed:
                await self._session.read(var)
                return
            times = await self._session.stream(var)
        self.account.streams[output] = times.later(way_s)

    async def _submit(self) -> None:
        """Submit all calls that were made since the last submission."""
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

    async def _create(self, output: ProgramOutput) -> None:
        async with self._network.trip():
            self._vars[output] = await self._session.create(output.name)

    async def _send(self, call: ProgramCall, *, early: bool = False) -> None:
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
