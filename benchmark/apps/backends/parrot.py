"""Parrot's client: the program submits its graph and reads only what it wants to see."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmark.apps.backends.waiting import WaitingProgram, first_of
from benchmark.apps.counters import Scrape
from benchmark.apps.network import Network
from benchmark.apps.program import Backend, Call, Output, Program, StreamTimes, Usage
from benchmark.apps.text import Text
from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.errors import SessionGone
from parrot.protocol.public import (
    CallParameter,
    CompletionInfo,
    ParameterInfo,
    SemanticCallRequest,
    SessionCreateResponse,
)
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.serve_client import ServeClient
from parrot.protocol.template import placeholder

_OUTPUT = "output"

Scope = tuple[int, str]
"""A session's id and secret."""


class GraphProgram(Program):
    """Calls are gathered until something is read, then submitted in two waves, whatever the depth
    of the graph: calls without producers together with the variables of the others' outputs, then
    the others, which name these variables.

    `early_start`: the first wave is wanted at once, before its readers are known: on a slow network
    the server then works during the second."""

    def __init__(
        self, client: ServeClient, network: Network, app: str, *, early_start: bool
    ) -> None:
        super().__init__(asyncio.get_running_loop().time)
        self._client = client
        self._network = network
        self._app = app
        self._early_start = early_start
        self._session: SessionCreateResponse | None = None
        self._var_ids: dict[Output, str] = {}
        self._new: list[Call] = []
        self._new_inputs: list[Output] = []

    async def prepare(self) -> None:
        async with self._network.trip():
            self._session = await self._client.create_session(apps=[self._app])

    async def set(self, output: Output, text: Text) -> None:
        await self._submit()
        async with self._network.trip():
            await self._client.set_var(*self._scope(), self._var_ids[output], text.content)

    async def read(self, *outputs: Output) -> None:
        await self._submit()
        await asyncio.gather(*(self._get(output) for output in outputs))

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
            times = await _stream_times(self._client, self._scope(), self._var_ids[output])
        return times.later(way_s)

    async def end(self) -> None:
        if self._session is not None:
            self.account.usages += await _close_session(self._client, self._scope())

    def _add(self, call: Call) -> None:
        self._new.append(call)

    def _add_input(self, output: Output) -> None:
        self._new_inputs.append(output)

    def _scope(self) -> Scope:
        assert self._session is not None
        return self._session.session_id, self._session.session_auth

    async def _get(self, output: Output) -> None:
        async with self._network.trip():
            await self._client.get_var(
                *self._scope(), self._var_ids[output], PerformanceCriteria.LATENCY
            )

    async def _submit(self) -> None:
        """All calls made since the last time."""
        calls, self._new = self._new, []
        inputs, self._new_inputs = self._new_inputs, []
        if not calls and not inputs:
            return
        if self._session is None:
            await self.prepare()
        known = set(self._var_ids)
        first = [call for call in calls if all(piece in known for piece in _inputs(call))]
        wanted = {piece for call in calls for piece in _inputs(call)} - known
        later = [call for call in calls if call not in first]
        variables = [call.output for call in later if call.output in wanted]
        await asyncio.gather(
            *(self._send(call, early=self._early_start and bool(later)) for call in first),
            *(self._create(output) for output in (*inputs, *variables)),
        )
        await asyncio.gather(*(self._send(call) for call in later))

    async def _create(self, output: Output) -> None:
        async with self._network.trip():
            self._var_ids[output] = await self._client.create_var(*self._scope(), output.name)

    async def _send(self, call: Call, *, early: bool = False) -> None:
        session_id, session_auth = self._scope()
        inputs = {piece: Bound(var_id=self._var_ids[piece]) for piece in _inputs(call)}
        template, parameters = call_template(call, inputs, self._var_ids.get(call.output))
        request = SemanticCallRequest(
            session_id=session_id,
            session_auth=session_auth,
            template=template,
            parameters=parameters,
            func_name=call.function,
            output_criteria=PerformanceCriteria.THROUGHPUT if early else None,
        )
        async with self._network.trip():
            response = await self._client.semantic_call(request)
        self._var_ids[call.output] = _output_id(response.param_info)


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
            piece: Bound(value=text)
            for piece, text in zip(call.prompt, texts, strict=True)
            if isinstance(piece, Output)
        }
        async with self._network.trip() as way_s:
            session = await self._client.create_session(apps=[self._app])
            scope = session.session_id, session.session_auth
            try:
                text, times = await self._run_call(call, inputs, scope)
            finally:
                self._releases.append(self._loop.create_task(self._release(scope)))
            if times is not None:
                self._streams[call.output] = times.later(way_s)
        return text

    async def end(self) -> None:
        await super().end()
        await asyncio.gather(*self._releases)

    async def _run_call(
        self, call: Call, inputs: Mapping[Output, "Bound"], scope: Scope
    ) -> tuple[str, StreamTimes | None]:
        template, parameters = call_template(call, inputs)
        response = await self._client.semantic_call(
            SemanticCallRequest(
                session_id=scope[0],
                session_auth=scope[1],
                template=template,
                parameters=parameters,
                func_name=call.function,
            )
        )
        var_id = _output_id(response.param_info)
        times = None
        if call.streamed:
            times = await _stream_times(self._client, scope, var_id)
        return await self._client.get_var(*scope, var_id, PerformanceCriteria.LATENCY), times

    async def _release(self, scope: Scope) -> None:
        self.account.usages += await _close_session(self._client, scope)


@dataclass(frozen=True, slots=True)
class Bound:
    """What an input of a call is bound to: a variable or a value."""

    var_id: str | None = None
    value: str | None = None


def call_template(
    call: Call, inputs: Mapping[Output, Bound], output_id: str | None = None
) -> tuple[str, list[CallParameter]]:
    """Constant texts stand in the template; data and outputs of other calls are its inputs.
    `output_id`: the variable that it shall set, if there is one already."""
    template: list[str] = []
    parameters: list[CallParameter] = []
    for number, piece in enumerate(call.prompt):
        if isinstance(piece, Text) and not piece.is_data:
            template.append(piece.content)
            continue
        name = f"input_{number}"
        bound = Bound(value=piece.content) if isinstance(piece, Text) else inputs[piece]
        template.append(placeholder(name))
        parameters.append(CallParameter(name=name, var_id=bound.var_id, value=bound.value))
    template.append(placeholder(_OUTPUT))
    sampling = SamplingConfig(
        temperature=0.0 if call.seed is None else 1.0,
        seed=call.seed,
        max_gen_length=call.output.tokens,
        ignore_tokenizer_eos=call.stop is None,
        stop_str=call.stop,
    )
    parameters.append(
        CallParameter(name=_OUTPUT, is_output=True, var_id=output_id, sampling_config=sampling)
    )
    return "".join(template), parameters


class ParrotBackend(Backend):
    """`whole_graph`: programs submit their graphs; otherwise one request after the other."""

    def __init__(
        self, client: ServeClient, scrape: Scrape, network: Network, *, whole_graph: bool
    ) -> None:
        super().__init__(scrape)
        self._client = client
        self._network = network
        self._whole_graph = whole_graph

    def program(self, app: str) -> Program:
        if not self._whole_graph:
            return RequestProgram(self._client, self._network, app)
        return GraphProgram(self._client, self._network, app, early_start=self._network.is_far)

    async def close(self) -> None:
        await self._client.close()


async def _stream_times(client: ServeClient, scope: Scope, var_id: str) -> StreamTimes:
    """At the server."""
    now = asyncio.get_running_loop().time
    first = last = 0.0
    async for _ in client.stream_var(*scope, var_id):
        last = now()
        first = first or last
    return StreamTimes(first or now(), last or now())


async def _close_session(client: ServeClient, scope: Scope) -> list[Usage]:
    """What its calls cost."""
    try:
        info = await client.session_info(*scope)
        await client.delete_session(*scope)
    except SessionGone:
        return []
    return [_usage(call) for call in info.calls if call.state == "done"]


def _usage(call: CompletionInfo) -> Usage:
    prompt_tokens = call.cached_tokens + call.computed_tokens
    return Usage(prompt_tokens, call.output_tokens, call.cached_tokens, call.engine)


def _inputs(call: Call) -> list[Output]:
    return [piece for piece in call.prompt if isinstance(piece, Output)]


def _output_id(infos: Iterable[ParameterInfo]) -> str:
    return next(info.var_id for info in infos if info.is_output)
