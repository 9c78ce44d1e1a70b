"""Random programs and faults: each output is settled correctly, and no state is left.

A call may fail only because of its own history: faults in the answers to its requests, and engines
that were lost during its life."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.protocol.engine_api import (
    EngineInfo,
    GenerateRequest,
    GenerateResponse,
    StreamChunk,
)
from parrot.protocol.errors import (
    Cancelled,
    EngineFailed,
    InternalError,
    NoEngine,
    NotFound,
    OutOfMemory,
    ParrotError,
    QuotaExceeded,
    Unavailable,
)
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.config import CoreConfig
from parrot.serve.events import CompletionUnserved
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.graph.nodes import (
    CallOptions,
    Completion,
    CompletionState,
    Objective,
    SemanticVariable,
    TextPiece,
    VariablePiece,
    VariableState,
)
from tests.serve.graph.held_runner import prompt_of
from tests.support.fake_engine import FakeEngine, Script, fake_engine
from tests.support.manual_clock import ManualClock

FAULTS: list[ParrotError | None] = [
    *(None, None, None),
    Unavailable("connection reset"),
    OutOfMemory("full"),
    NotFound("no such context"),
    InternalError("bug"),
    QuotaExceeded("backlog"),
]


def answer(prompt: str) -> str:
    """The output of all engines. It depends on the prompt, so a wrong continuation is noticed."""
    question, _, said = prompt.rpartition(">")
    assert prompt.endswith(said)
    full = f"[{len(question)}] and so on"
    assert full.startswith(said), (prompt, said)
    return full[len(said) :]


REFUSALS = (OutOfMemory, NotFound, QuotaExceeded)
MAX_LOST, MAX_REFUSED = 3, 5


@dataclass
class Life:
    """The history of a call, as an observer sees it."""

    num_lost_before: int  # Number of engines lost before the call was submitted.
    faults: list[ParrotError] = field(default_factory=list)  # The engines' errors for this call.
    is_cancelled: bool = False
    end: int | None = None  # Number of lost engines when the output was settled.


class WatchedEngine(FakeEngine):
    """Reports each error that it returns, with the id of the call."""

    on_fault: Callable[[int, ParrotError], None]

    async def generate_stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[StreamChunk | GenerateResponse, None]:
        try:
            async with aclosing(super().generate_stream(request)) as events:
                async for event in events:
                    yield event
        except ParrotError as error:
            self.on_fault(request.task_id, error)
            raise


class History:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock(10.0)
        self.engines: dict[str, FakeEngine] = {}
        config = CoreConfig(constant_prefix_var_timeout=50.0)
        self.dispatcher = Dispatcher(config, self.clock, self.connect)
        self.completions: list[Completion] = []
        self.lives: dict[int, Life] = {}
        self.num_joined = 0
        self.dispatcher.events.add({CompletionUnserved: self.give_up})
        self.withdrawn: set[int] = set()

    def connect(self, info: EngineInfo) -> FakeEngine:
        return self.engines[info.engine_name]

    async def join(self) -> None:
        name = self.rng.choice("abc")
        is_text = self.rng.random() < 0.2
        plain = fake_engine(
            name, text=is_text, tokens_capacity=400, max_seq_len=300, tasks_capacity=3
        )
        engine = WatchedEngine(plain.info, plain.tokenizer_response, self.script())
        engine.on_fault = lambda task_id, error: self.lives[task_id].faults.append(error)
        if (old := self.engines.get(name)) is not None:
            old.info = engine.info  # The new process answers at this address now.
        self.engines[name] = engine
        await self.dispatcher.fleet.register(engine.info)
        self.num_joined += 1

    def script(self) -> Script:
        hang_after = self.rng.choice([None, None, 0, 1, 2, 3])
        return Script(text=answer, hang_after=hang_after, error=self.rng.choice(FAULTS), steps=3)

    def submit(self) -> None:
        done = [c for c in self.completions if c.state is CompletionState.DONE]
        previous = self.rng.choice(done) if done and self.rng.random() < 0.4 else None
        session = previous.session_id if previous else self.rng.randrange(3)
        value = SemanticVariable("x", "x", session)
        value.set(self.rng.choice(["one", "two", "a longer value"]))
        number = len(self.completions)
        completion = Completion(
            id=number,
            request_id=number,
            session_id=session,
            options=CallOptions("f", tenant="st"[session % 2], cache_salt="st"[session % 2]),
            fill=(TextPiece(self.rng.choice(["Some template ", "Other "])), VariablePiece(value),
                  TextPiece(">")),
            output=SemanticVariable(str(number), "v", session),
            sampling=SamplingConfig(max_gen_length=40, seed=self.rng.choice([None, 1])),
            previous=previous,
            objective=Objective(self.rng.choice(list(PerformanceCriteria)), 0, 1.0),
            wants_stream=self.rng.random() < 0.5,
        )  # fmt: skip
        life = self.lives[number] = Life(self.num_lost)
        completion.output.on_settled(lambda _: self.note_end(life))
        self.completions.append(completion)
        self.dispatcher.submit(completion)

    @property
    def num_lost(self) -> int:
        return self.num_joined - len(self.dispatcher.fleet.views())

    def note_end(self, life: Life) -> None:
        life.end = self.num_lost

    async def act(self) -> None:
        match self.rng.randrange(12):
            case 0:
                await self.join()
            case 1 | 2 | 3:
                self.submit()
            case 4 if self.completions:
                completion = self.rng.choice(self.completions)
                self.lives[completion.id].is_cancelled = True
                self.dispatcher.cancel(completion, Cancelled("enough"))
            case 5 if self.completions:
                self.withdraw(self.rng.choice(self.completions))
            case 6:
                list(self.dispatcher.release_session(self.rng.randrange(3)))
            case 7 if self.engines:
                engine = self.rng.choice(list(self.engines.values()))
                engine.script = self.script()
                engine.ping_error = self.rng.choice([None, Unavailable("connection refused")])
                engine.resume.set()
                engine.resume = asyncio.Event()
            case 8 if self.engines:
                engine = self.rng.choice(list(self.engines.values()))
                engine.scripts = [self.script() for _ in range(3)]
            case 9 if self.completions:
                self.dispatcher.follow(self.rng.choice(self.completions))
            case 10 if self.dispatcher.fleet.views():
                view = self.rng.choice(self.dispatcher.fleet.views())
                self.dispatcher.drains.drain(view.id, is_draining=self.rng.random() < 0.5)
            case _:
                await self.clock.advance(self.rng.choice([0.0, 0.1, 5.0, 20.0]))

    def give_up(self, event: CompletionUnserved) -> None:
        """The readers leave when no engine can run the call."""
        assert isinstance(event.error, NoEngine)
        assert all(view.is_draining for view in self.dispatcher.fleet.views())
        assert not event.completion.output.is_settled
        self.withdraw(event.completion)

    def withdraw(self, completion: Completion) -> None:
        if completion.output.is_settled:
            return
        if completion.id in self.withdrawn:
            self.withdrawn.discard(completion.id)
            self.dispatcher.submit(completion)
        else:
            self.withdrawn.add(completion.id)
            self.dispatcher.withdraw(completion)
            completion.output.reset_partial_text()
            assert completion.state is CompletionState.IDLE

    async def run(self) -> None:
        for _ in range(self.rng.randrange(10, 60)):
            await self.act()
            for _ in range(self.rng.randrange(12)):
                await asyncio.sleep(0)
            self.dispatcher.check_integrity()
        await self.finish()

    async def finish(self) -> None:
        """Stop all heartbeats: all reads must end within the timeouts."""
        for _ in range(4):
            await self.clock.advance(31.0)
        for completion in self.completions:
            if completion.id not in self.withdrawn or completion.output.is_settled:
                self.check(completion)
        for session in range(3):
            list(self.dispatcher.release_session(session))
        self.dispatcher.check_integrity()
        assert self.dispatcher.fleet.views() == []
        assert self.dispatcher.num_queued == 0
        await self.dispatcher.close()

    def check(self, completion: Completion) -> None:
        output = completion.output
        assert output.is_settled, completion
        if output.state is VariableState.READY:
            assert output.text == f"[{self.prompt_len(completion)}] and so on"
            assert completion.state is CompletionState.DONE
        else:
            assert completion.state in (CompletionState.FAILED, CompletionState.CANCELLED)
            assert output.error is not None
            self.check_error(completion, output.error)

    def check_error(self, completion: Completion, error: ParrotError) -> None:
        life = self.lives[completion.id]
        assert life.end is not None, completion
        num_lost = life.end
        identity = self.identity(completion)  # Calls with the same identity may share a run.
        same = [self.lives[c.id] for c in self.completions if self.identity(c) == identity]
        faults = [fault for other in same for fault in other.faults]
        num_lost -= min(other.num_lost_before for other in same)
        refusals = [fault for fault in faults if isinstance(fault, REFUSALS)]
        num_failures = len(faults) - len(refusals) + num_lost
        was_tried = num_failures >= MAX_LOST or len(refusals) >= MAX_REFUSED
        match error:
            case Cancelled():
                assert life.is_cancelled, error
            case OutOfMemory() | QuotaExceeded():
                assert was_tried, (error, faults)
                assert type(error) in map(type, refusals), (error, faults)
            case EngineFailed():
                assert was_tried, (error, faults, num_failures)
            case _:
                raise AssertionError(error)

    def identity(self, completion: Completion) -> object:
        pieces = [p.text if isinstance(p, TextPiece) else p.variable for p in prompt_of(completion)]
        texts = [p if isinstance(p, str) else p.partial_text for p in pieces]
        seed = completion.sampling.seed
        own = completion.id if seed is None else None
        return completion.options.tenant, texts, seed, own

    def prompt_len(self, completion: Completion) -> int:
        texts = [
            piece.text if isinstance(piece, TextPiece) else piece.variable.text
            for piece in prompt_of(completion)
        ]
        return len("".join(texts)) - 1


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_every_read_ends_and_no_state_is_left(seed: int) -> None:
    async def story() -> None:
        await History(seed).run()

    asyncio.run(story())
