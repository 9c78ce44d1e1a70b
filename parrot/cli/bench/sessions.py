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


Piece = str | Data | Var


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
        """Read as a stream. An empty output has the time of its end."""
        now = asyncio.get_running_loop().time
        arrivals = [now() async for _ in self.client.stream_var(**self.scope, var_id=var.id)]
        return StreamTimes(tuple(arrivals) or (now(),))

    async def info(self) -> SessionInfo:
        return await self.client.session_info(**self.scope)

    async def end(self) -> None:
        await self.client.delete_session(**self.scope)


async def submit_call(
    session: BenchSession,
    call: ProgramCall,
    inputs: Mapping[ProgramOutput, Var | Data],
    **options: Any,
) -> Var:
    """Constant texts become the template. Data and outputs of other calls become inputs. `options`:
    see `BenchSession.call`."""
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
    """End a session. Returns the usage of its completed calls."""
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
