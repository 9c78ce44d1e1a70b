"""The styles in which a program of a workload runs: as a client of today, whose calls each wait for
their inputs and send a whole prompt (to any server of OpenAI's API), and as one of Parrot, which
submits its graph and reads only what it wants to see."""

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson

from parrot.cli.bench.program import (
    CallUsage,
    Network,
    Program,
    ProgramCall,
    ProgramOutput,
    StreamTimes,
)
from parrot.cli.bench.text import PromptText
from parrot.protocol.errors import (
    EngineFailed,
    InternalError,
    ParrotError,
    SessionGone,
    Unavailable,
)
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.http import HttpClient
from parrot.protocol.public import SemanticCallRequest, SessionInfo
from parrot.protocol.serve_client import ServeClient
from parrot.protocol.template import placeholder


async def first_of(
    tasks: Mapping[asyncio.Task[Any], ProgramOutput], count: int
) -> list[ProgramOutput]:
    """Wait for `count` tasks: their outputs, in the order in which they end. The others are
    cancelled. Raises what one of these did."""
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
    """Subclasses send one request. Requests of different calls run side by side."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(self._loop.time)
        self._tasks: dict[ProgramOutput, asyncio.Task[str]] = {}
        self._inputs: dict[ProgramOutput, asyncio.Future[str]] = {}

    @abstractmethod
    async def _complete(self, call: ProgramCall, texts: Sequence[str]) -> str:
        """One request; `texts` are the prompt's pieces. Records the usage, and for a streamed call
        the times. Cancelling it ends the request."""

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


_OUTPUT = "out"


class Data(str):
    """A text that a call gets as an input, instead of having it in its template."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Var:
    """A semantic variable, and the request of the call that it is the output of, if it is one."""

    id: str
    request_id: int | None = None


Piece = str | Data | Var


def spaced(parts: Iterable[Piece]) -> list[Piece]:
    """The parts, each with a space behind it."""
    return [piece for part in parts for piece in (part, " ")]


class BenchSession:
    """One session of a program. `scope`: its id and its secret."""

    def __init__(self, client: ServeClient, scope: Mapping[str, Any]) -> None:
        self.client = client
        self.scope = scope

    @classmethod
    async def begin(
        cls, client: ServeClient, app: str | None = None, api_key: str | None = None
    ) -> "BenchSession":
        created = await client.create_session(api_key, None if app is None else [app])
        return cls(client, created.model_dump())

    async def call(
        self,
        prompt: Sequence[Piece],
        tokens: int,
        *,
        sampling: Mapping[str, Any] | None = None,
        output: Var | None = None,
        **options: Any,
    ) -> Var:
        """Submit a call with one output of at most `tokens`. `output`: the variable that it shall
        set, if there is one already. `options`: fields of the request."""
        template, parameters = "", []
        for number, piece in enumerate(prompt):
            if isinstance(piece, Data | Var):
                name = f"i{number}"
                given = {"var_id": piece.id} if isinstance(piece, Var) else {"value": str(piece)}
                parameters.append({"name": name, **given})
                piece = placeholder(name)
            template += piece
        out: dict[str, Any] = {"name": _OUTPUT, "is_output": True}
        out["sampling_config"] = {"max_gen_length": tokens} | dict(sampling or {})
        if output is not None:
            out["var_id"] = output.id
        body = {"template": template + placeholder(_OUTPUT), "parameters": [*parameters, out]}
        request = SemanticCallRequest.model_validate({**self.scope, **body, **options})
        response = await self.client.semantic_call(request)
        return Var(response.param_info[-1].var_id, response.request_id)

    async def create(self, name: str, content: str | None = None) -> Var:
        return Var(await self.client.create_var(**self.scope, var_name=name, content=content))

    async def set(self, var: Var, content: str) -> None:
        await self.client.set_var(**self.scope, var_id=var.id, content=content)

    async def read(
        self, var: Var, criteria: PerformanceCriteria = PerformanceCriteria.LATENCY
    ) -> str:
        return await self.client.get_var(**self.scope, var_id=var.id, criteria=criteria)

    async def stream(self, var: Var) -> StreamTimes:
        """Read piece by piece. An empty output comes when it ends."""
        now = asyncio.get_running_loop().time
        arrivals = [now() async for _ in self.client.stream_var(**self.scope, var_id=var.id)]
        return StreamTimes(tuple(arrivals) or (now(),))

    async def info(self) -> SessionInfo:
        return await self.client.session_info(**self.scope)

    async def end(self) -> None:
        await self.client.delete_session(**self.scope)


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
        """A read that is cancelled withdraws what only it wanted."""
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


async def submit_call(
    session: BenchSession,
    call: ProgramCall,
    inputs: Mapping[ProgramOutput, Var | Data],
    **options: Any,
) -> Var:
    """Constant texts stand in the template; data and outputs of other calls are its inputs.
    `options`: those of `BenchSession.call`."""
    prompt = [
        inputs[piece]
        if isinstance(piece, ProgramOutput)
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


async def close_session(session: BenchSession) -> list[CallUsage]:
    """End a session; returns what its calls cost."""
    try:
        info = await session.info()
        await session.end()
    except SessionGone:
        return []
    return [
        CallUsage(
            call.cached_tokens + call.computed_tokens,
            call.output_tokens,
            call.cached_tokens,
            call.engine,
        )
        for call in info.calls
        if call.state == "done"
    ]


_DONE = b"[DONE]"
_MAX_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class OpenAITarget:
    """`is_chat`: prompts are sent as a user's message. `timeout_s`: None waits as long as the
    server is there; streams may be silent for as long, or ten minutes. `ignores_eos`: it knows the
    field `ignore_eos`, as vLLM, SGLang and others do."""

    http: HttpClient
    model: str
    is_chat: bool = False
    timeout_s: float | None = None
    ignores_eos: bool = True

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, prompt: str, *, ignore_eos: bool, **fields: Any) -> dict[str, Any]:
        """A request with these fields, but those that are None."""
        if self.ignores_eos:
            fields["ignore_eos"] = ignore_eos
        asked: Any = {"prompt": prompt}
        if self.is_chat:
            asked = {"messages": [{"role": "user", "content": prompt}]}
        given = {key: value for key, value in fields.items() if value is not None}
        return {"model": self.model, **asked, **given}


def openai_http(base_url: str, api_key: str | None) -> HttpClient:
    """`base_url` with or without its `/v1`."""
    root = base_url.rstrip("/").removesuffix("/v1")
    return HttpClient(root, bearer_token=api_key, read_error=_refusal)


def _refusal(payload: Any, status: int, headers: Mapping[str, str]) -> ParrotError:
    error = payload.get("error", payload) if isinstance(payload, Mapping) else None
    message = error.get("message", error) if isinstance(error, Mapping) else error
    reason = "" if message is None else f": {str(message)[:_MAX_MESSAGE]}"
    return EngineFailed(f"HTTP {status}{reason}")


class OpenAIProgram(WaitingProgram):
    def __init__(self, target: OpenAITarget, network: Network) -> None:
        super().__init__()
        self._target = target
        self._network = network

    async def _complete(self, call: ProgramCall, texts: Sequence[str]) -> str:
        target = self._target
        body = target.body("".join(texts), **_fields(call))
        async with self._network.trip() as way_s:
            if call.streamed:
                text, usage, times = await self._stream(body)
                self.account.streams[call.output] = times.later(way_s)
            else:
                answer = await target.http.request(
                    "POST", target.path, body=body, timeout_s=target.timeout_s
                )
                text, usage = _text(answer, "message"), answer.get("usage")
        self._account_for(usage)
        return text

    async def _stream(self, body: dict[str, Any]) -> tuple[str, Any, StreamTimes]:
        """The times are those at the server. Raises `ParrotError`, also when it breaks off."""
        target = self._target
        pieces: list[str] = []
        arrivals: list[float] = []
        usage = None
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        idle_s = 600.0 if target.timeout_s is None else target.timeout_s
        stream = target.http.stream("POST", target.path, body=body, idle_timeout_s=idle_s)
        async with aclosing(stream) as events:
            async for _, data in events:
                if data.strip() == _DONE:
                    tokens = None if usage is None else int(usage["completion_tokens"])
                    times = StreamTimes(tuple(arrivals) or (self.now(),), tokens)
                    return "".join(pieces), usage, times
                event = _parsed(data)
                usage = event.get("usage") or usage
                if event.get("choices") and (piece := _text(event, "delta")):
                    pieces.append(piece)
                    arrivals.append(self.now())
        raise Unavailable("the stream broke off")

    def _account_for(self, usage: dict[str, Any] | None) -> None:
        if usage is None:
            return
        details = usage.get("prompt_tokens_details") or {}
        self.account.usages.append(
            CallUsage(
                usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens")
            )
        )


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        event = None
    if not isinstance(event, dict):
        raise InternalError("an event of the stream is not a JSON object")
    if (error := event.get("error")) is not None:
        raise _refusal(event, error.get("code", 500) if isinstance(error, dict) else 500, {})
    return event


def _text(answer: Any, chat_field: str) -> str:
    """The text of the first choice. Raises `InternalError` for what is no answer."""
    try:
        choice = answer["choices"][0]
        said = choice[chat_field].get("content") if chat_field in choice else choice.get("text")
        return said or ""
    except (KeyError, IndexError, TypeError, AttributeError):
        raise InternalError("the server's answer is not one of OpenAI's API") from None


def _fields(call: ProgramCall) -> dict[str, Any]:
    return {
        "max_tokens": call.output.tokens,
        "temperature": 0.0 if call.seed is None else 1.0,
        "ignore_eos": call.stop is None,
        "stop": call.stop,
        "seed": call.seed,
    }
