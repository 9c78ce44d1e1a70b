"""Sessions of a ServeCore, as programs that measure use them."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parrot.cli.bench.program import CallUsage, ProgramCall, ProgramOutput, StreamTimes
from parrot.protocol.errors import SessionGone
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.public import SemanticCallRequest, SessionInfo
from parrot.protocol.serve_client import ServeClient
from parrot.protocol.template import placeholder

_OUTPUT = "out"


class Data(str):
    """A text that a call receives as an input. Other texts are part of the template."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Var:
    """A semantic variable. `request_id`: of the call whose output the variable is."""

    id: str
    request_id: int | None = None


@dataclass(frozen=True, slots=True)
class NewVar:
    """A variable of the same graph request. `name`: its name in the request."""

    name: str


Piece = str | Data | Var | NewVar


def spaced(parts: Iterable[Piece]) -> list[Piece]:
    """The parts, each with a space after it."""
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
        """Submit a call with one output of at most `tokens`. `output`: an existing variable for the
        output. `options`: fields of the request."""
        fields = call_fields(prompt, tokens, sampling, output)
        request = SemanticCallRequest.model_validate({**self.scope, **fields, **options})
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
        """Read as a stream. An empty output has the time of its end."""
        now = asyncio.get_running_loop().time
        arrivals = [now() async for _ in self.client.stream_var(**self.scope, var_id=var.id)]
        return StreamTimes(tuple(arrivals) or (now(),))

    async def info(self) -> SessionInfo:
        return await self.client.session_info(**self.scope)

    async def end(self) -> None:
        await self.client.delete_session(**self.scope)


def call_fields(
    prompt: Sequence[Piece],
    tokens: int,
    sampling: Mapping[str, Any] | None,
    output: Var | NewVar | None,
) -> dict[str, Any]:
    """The template and the parameters of a request. See `BenchSession.call`."""
    template, parameters = "", []
    for number, piece in enumerate(prompt):
        if not isinstance(piece, str) or isinstance(piece, Data):
            name = f"i{number}"
            given = {"value": str(piece)} if isinstance(piece, Data) else _reference(piece)
            parameters.append({"name": name, **given})
            piece = placeholder(name)
        template += piece
    out: dict[str, Any] = {"name": _OUTPUT, "is_output": True}
    out["sampling_config"] = {"max_gen_length": tokens} | dict(sampling or {})
    if output is not None:
        out |= _reference(output)
    return {"template": template + placeholder(_OUTPUT), "parameters": [*parameters, out]}


def _reference(var: Var | NewVar) -> dict[str, str]:
    return {"var_id": var.id} if isinstance(var, Var) else {"var": var.name}


def prompt_of(
    call: ProgramCall, inputs: Mapping[ProgramOutput, Var | NewVar | Data]
) -> list[Piece]:
    """Constant texts become the template. Data and outputs of other calls become inputs."""
    return [
        inputs[piece]
        if isinstance(piece, ProgramOutput)
        else Data(piece.content)
        if piece.is_data
        else piece.content
        for piece in call.prompt
    ]


def sampling_of(call: ProgramCall) -> dict[str, Any]:
    return {
        "temperature": 0.0 if call.seed is None else 1.0,
        "seed": call.seed,
        "ignore_tokenizer_eos": call.stop is None,
        "stop_str": call.stop,
    }


async def close_session(session: BenchSession) -> list[CallUsage]:
    """End a session. Returns the usage of its completed calls."""
    try:
        info = await session.info()
        await session.end()
    except SessionGone:
        return []
    return usages_of(info)


def usages_of(info: SessionInfo) -> list[CallUsage]:
    """The usage of the completed calls."""
    return [
        CallUsage(
            call.cached_tokens + call.computed_tokens,
            call.output_tokens,
            call.cached_tokens,
            call.engine,
            call.reused,
        )
        for call in info.calls
        if call.state == "done"
    ]
