"""ServeCore in virtual time, with an engine that answers each call when the test decides."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from parrot.protocol.engine_api import (
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    RegisterRequest,
    StreamChunk,
    Usage,
)
from parrot.protocol.engine_client import OnChunk
from parrot.protocol.errors import ModelNumerics, ParrotError
from parrot.protocol.public import SemanticCallRequest, SessionCreateRequest, VarGetRequest
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.events import Sink
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.tasks import Sandbox
from tests.support.fake_engine import FakeEngine, fake_engine, scores
from tests.support.manual_clock import ManualClock
from tests.support.requests import made, taken, var_ids

BROKEN = ModelNumerics("it broke")
"""An error of an engine after which no other engine is tried."""


@dataclass(eq=False)
class Held:
    """A call that the engine has not answered yet. Its prompt starts with `name: `."""

    name: str
    request: GenerateRequest
    on_chunk: OnChunk | None
    answer: "asyncio.Future[GenerateResponse]"
    streamed: str = ""


@dataclass
class HeldEngine(FakeEngine):
    """`aborted_names` has the names of calls that ServeCore has aborted."""

    held: list[Held] = field(default_factory=list)
    aborted_names: list[str] = field(default_factory=list)

    async def generate(
        self, request: GenerateRequest, on_chunk: OnChunk | None = None
    ) -> GenerateResponse:
        self._fill(request.fills)
        prompt = self._decode(self.contexts[request.context_id])
        answer = asyncio.get_running_loop().create_future()
        held = Held(prompt.partition(": ")[0], request, on_chunk, answer)
        self.held.append(held)
        try:
            return await answer
        except asyncio.CancelledError:
            self.aborted_names.append(held.name)
            raise
        finally:
            self.held.remove(held)

    def stream(self, call: Held, text: str) -> None:
        """Stream more text of an output."""
        assert call.on_chunk is not None, "the output has no streaming reader"
        assert self.tokenizer_response is None, "the engine must work without tokens"
        self.contexts[call.request.context_id].extend(text)
        call.streamed += text
        call.on_chunk(StreamChunk(ids=[], text=text))

    def answer(self, call: Held, text: str, *, with_ids: bool = True) -> None:
        """Finish the call with the output `text`. Without `with_ids`, the answer has no token
        ids."""
        ids = self._encode(text)
        if self.tokenizer_response is not None:
            ids += self.tokenizer_response.special_ids.eos[:1]
        contents = self.contexts[call.request.context_id]
        contents.extend(ids or text.removeprefix(call.streamed))
        call.answer.set_result(
            GenerateResponse(
                generated_text=text,
                generated_ids=ids if with_ids else [],
                finish_reason=FinishReason.STOP,
                usage=Usage(output_tokens=len(ids or text)),
                logprobs=scores(call.request, ids, text, self._codec),
            )
        )

    def find(self, name: str) -> Held:
        """The oldest call with this name."""
        return next(held for held in self.held if held.name == name)


def held_engine(
    tasks_capacity: int = 10_000, *, model: str = "tiny", text: bool = True
) -> HeldEngine:
    engine = fake_engine(
        model=model, text=text, tasks_capacity=tasks_capacity, tokens_capacity=10**9
    )
    return HeldEngine(engine.info, engine.tokenizer_response)


class HeldWorld:
    """A core with one engine and a session, with short forms of its requests."""

    def __init__(self, core: ServeCore, engine: HeldEngine, clock: ManualClock) -> None:
        self.core = core
        self.engine = engine
        self.clock = clock
        self.scope: dict[str, Any] = {}

    @classmethod
    async def open(
        cls,
        *,
        tasks_capacity: int = 10_000,
        sinks: Sequence[Sink] = (),
        sandbox: Sandbox | None = None,
        **config: Any,
    ) -> Self:
        """`tasks_capacity` is the number of calls that the engine accepts at once. With 0, no
        engine has registered."""
        clock, engine = ManualClock(start=1000), held_engine(max(1, tasks_capacity))
        defaults = {"session_life_span": 60.0, "engine_heartbeat_timeout": 1e9}
        settings = CoreConfig(**(defaults | config))
        dispatcher = Dispatcher(settings, clock, lambda info: engine)
        core = ServeCore(settings, clock=clock, dispatcher=dispatcher, sandbox=sandbox, sinks=sinks)
        world = cls(core, engine, clock)
        if tasks_capacity:
            await world.join()
        world.enter(config["api_keys"][0] if "api_keys" in config else None)
        return world

    def enter(self, api_key: str | None = None) -> None:
        """Create a new session and use it from now on."""
        session = self.core.create_session(SessionCreateRequest(api_key=api_key))
        self.scope = session.model_dump()

    async def join(self) -> None:
        await self.core.register_engine(RegisterRequest(engine_config=self.engine.info))

    async def close(self) -> None:
        self.core.check_integrity()
        await self.core.close()

    def call(self, output: str, *inputs: str, **fields: Any) -> str:
        """Submit a call with these input variables. Returns the id of its output."""
        parameters = [taken(f"i{n}", var_id) for n, var_id in enumerate(inputs)]
        given = "".join(f"{{{{{parameter['name']}}}}}" for parameter in parameters)
        template = f"{output}: {given}{{{{{output}}}}}"
        body = self.scope | {"template": template, "parameters": [*parameters, made(output)]}
        request = SemanticCallRequest.model_validate(body | fields)
        return var_ids(self.core.submit_call(request))[output]

    def variable(self, name: str = "x", content: str | None = None) -> str:
        return self.core.create_var(*self.scope.values(), name, content)

    def request(self, **fields: Any) -> VarGetRequest:
        return VarGetRequest.model_validate(self.scope | fields)

    def read(self, var_id: str, **fields: Any) -> asyncio.Task[str]:
        return asyncio.ensure_future(self._text(self.request(**fields), var_id))

    async def _text(self, request: VarGetRequest, var_id: str) -> str:
        return (await self.core.read(request, var_id)).content

    async def settle(self) -> None:
        await self.clock.advance(0)

    # Actions of the engine

    @property
    def running(self) -> list[str]:
        """The names of the engine's unanswered calls, in order of arrival."""
        return [held.name for held in self.engine.held]

    async def finish(self, name: str, text: str | None = None) -> None:
        await self.answer(self.engine.find(name), f"<{name}>" if text is None else text)

    async def answer(self, call: Held, text: str) -> None:
        self.engine.answer(call, text)
        await self.settle()

    async def fail(self, name: str, error: ParrotError = BROKEN) -> None:
        self.engine.find(name).answer.set_exception(error)
        await self.settle()

    def stream(self, name: str, text: str) -> None:
        """Stream more text of an output."""
        self.engine.stream(self.engine.find(name), text)
