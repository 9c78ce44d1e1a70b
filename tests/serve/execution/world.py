"""A dispatcher on virtual time with engines inside the process."""

import asyncio
from itertools import count

import pytest

from parrot.protocol.engine_api import EngineInfo, HeartbeatRequest, RuntimeInfo
from parrot.protocol.errors import ParrotError
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig
from parrot.serve.events import CompletionUnserved
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.graph.nodes import (
    CallOptions,
    Completion,
    Objective,
    Piece,
    SemanticVariable,
    TextPiece,
    VariablePiece,
)
from tests.support.byte_tokenizer import byte_tokenizer, tokenizer_id_of
from tests.support.fake_engine import FakeEngine
from tests.support.manual_clock import ManualClock

OPTIONS = CallOptions(func_name="f", tenant="acme", cache_salt="acme")
TOKENIZER_ID = tokenizer_id_of(byte_tokenizer())


class World:
    """A dispatcher on virtual time, with the inputs that ServeCore would pass to it."""

    def __init__(self, **scheduler: object) -> None:
        self.clock = ManualClock(1000.0)
        self.engines: dict[str, FakeEngine] = {}
        self._names: dict[int, str] = {}  # Includes lost engines.
        self._ids = count()
        config = CoreConfig(
            global_scheduler=GlobalSchedulerConfig.model_validate(scheduler),
            engine_heartbeat_timeout=30.0,
            constant_prefix_var_timeout=600.0,
            max_engines_num=4,
        )
        self.dispatcher = Dispatcher(config, self.clock, self.connect)
        self.dispatcher.events.add({CompletionUnserved: _refuse})

    def connect(self, info: EngineInfo) -> FakeEngine:
        return self.engines[info.engine_name]

    async def join(self, engine: FakeEngine) -> int:
        name = engine.info.engine_name
        self.engines[name] = engine
        engine_id = await self.dispatcher.fleet.register(engine.info)
        self._names[engine_id] = name
        return engine_id

    def completion(
        self,
        *pieces: str | SemanticVariable,
        session: int = 1,
        previous: Completion | None = None,
        stream: bool = False,
        options: CallOptions = OPTIONS,
        sampling: SamplingConfig | None = None,
    ) -> Completion:
        number = next(self._ids)
        fill: list[Piece] = [
            TextPiece(p) if isinstance(p, str) else VariablePiece(p) for p in pieces
        ]
        return Completion(
            id=number,
            request_id=number,
            session_id=session,
            options=options,
            fill=tuple(fill),
            output=SemanticVariable(f"v{number}", f"out{number}", session),
            sampling=sampling or SamplingConfig(max_gen_length=20),
            previous=previous,
            wants_stream=stream,
            objective=Objective(PerformanceCriteria.LATENCY, 0, 1.0),
        )

    def submit(self, *pieces: str | SemanticVariable, **kwargs: object) -> Completion:
        completion = self.completion(*pieces, **kwargs)  # type: ignore[arg-type]
        self.dispatcher.submit(completion)
        return completion

    def withdraw(self, completion: Completion) -> None:
        """Withdraw a completion, as the graph does when its last reader leaves."""
        self.dispatcher.withdraw(completion)
        completion.output.reset_partial_text()

    def lose(self, engine_id: int) -> None:
        engine = self.dispatcher.fleet.engines.get(engine_id)
        assert engine is not None
        self.dispatcher.fleet.lose(engine, "test")

    def heartbeat(self, engine_id: int, *, core: str = "", **runtime: object) -> str:
        """Send a heartbeat, and return the state in the answer."""
        request = HeartbeatRequest(
            engine_id=engine_id,
            engine_name=self._names[engine_id],
            core=core,
            runtime_info=RuntimeInfo.model_validate(runtime),
        )
        return self.dispatcher.fleet.heartbeat(request).state

    async def settle(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)


def _refuse(event: CompletionUnserved) -> None:
    event.completion.output.refuse(event.error)


def value(text: str) -> SemanticVariable:
    variable = SemanticVariable("x", "x", 1)
    variable.set(text)
    return variable


async def error_of(completion: Completion) -> ParrotError:
    with pytest.raises(ParrotError) as caught:
        await asyncio.wait_for(completion.output.wait(), 30)
    return caught.value
