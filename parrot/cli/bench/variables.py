"""The style of a Parrot program: it submits its graph of semantic variables and reads the outputs
that it needs."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from parrot.cli.bench.program import Network, Program, ProgramCall, ProgramOutput
from parrot.cli.bench.sessions import (
    BenchSession,
    NewVar,
    Var,
    call_fields,
    close_session,
    prompt_of,
    sampling_of,
)
from parrot.cli.bench.text import PromptText
from parrot.cli.bench.waiting import first_of
from parrot.protocol.public import MAX_CALLS, GraphRequest
from parrot.protocol.serve_client import ServeClient


class GraphProgram(Program):
    """Collects calls until the program reads an output, then submits them as one graph. The first
    graph opens the session, unless `prepare` did. Very large graphs take several requests."""

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
        while calls or inputs:
            await self._post(inputs, calls[:MAX_CALLS])
            calls, inputs = calls[MAX_CALLS:], []

    async def _post(self, inputs: Sequence[ProgramOutput], calls: Sequence[ProgramCall]) -> None:
        """Submit one graph. Calls may read outputs of earlier graphs and of calls before them."""
        outputs = [*inputs, *(call.output for call in calls)]
        new = {output: NewVar(f"v{number}") for number, output in enumerate(outputs)}
        known: dict[ProgramOutput, Var | NewVar] = {**self._vars, **new}
        request = GraphRequest.model_validate(
            {
                **self._scope(),
                "variables": [{"name": new[one].name, "var_name": one.name} for one in inputs],
                "calls": [self._fields(call, known) for call in calls],
            }
        )
        async with self._network.trip():
            answer = await self._client.semantic_graph(request)
        if self._opened is None:
            scope = {"session_id": answer.session_id, "session_auth": answer.session_auth}
            self._opened = BenchSession(self._client, scope)
        for output in inputs:
            self._vars[output] = Var(answer.variables[new[output].name])
        for call, response in zip(calls, answer.calls, strict=True):
            var_id = answer.variables[new[call.output].name]
            self._vars[call.output] = Var(var_id, response.request_id)

    def _scope(self) -> Mapping[str, Any]:
        """The session of a graph: the open session, or a new one."""
        if self._opened is not None:
            return self._opened.scope
        return {"session": {"api_key": self._api_key, "apps": [self._app]}}

    def _fields(
        self, call: ProgramCall, known: Mapping[ProgramOutput, Var | NewVar]
    ) -> dict[str, Any]:
        prompt, output = prompt_of(call, known), known[call.output]
        fields = call_fields(prompt, call.output.tokens, sampling_of(call), output)
        return {**fields, "func_name": call.function, "models": self._models}
