"""Random programs on a simulated cluster.

A `Story` takes random steps (submit, read, stream, race, cancel, give up, lose an engine, end a
session, let time pass) against the real ServeCore over `sim` engines on virtual time."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, get_args

from parrot.engine.config import SimConfig
from parrot.protocol.errors import (
    AlreadySet,
    Conflict,
    CyclicGraph,
    NotFound,
    SessionGone,
)
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.public import (
    CallResponse,
    FirstVarsRequest,
    NativeCallRequest,
    SemanticCallRequest,
    SessionCreateRequest,
    VarGetRequest,
)
from parrot.serve.config import (
    CoreConfig,
    GlobalSchedulerConfig,
    KvEviction,
    OrderName,
    PlacementName,
)
from parrot.simulation import SimCluster
from tests.e2e.random_world import Program, Read, World
from tests.e2e.sequential_reference import CallPlan, Joined, Output, Place

LIFE_SPAN_S = 60.0
HEARTBEAT_S = 9.0
PREFIX_TIMEOUT_S = 200.0
TENANTS = ["one", "two"]
PREFIXES = ["You are a parrot that repeats what it hears. ", "Summarise in a few words: ", "Q: "]
VALUES = ["alpha", "beta and gamma", "x" * 40, "", "{{not a place}}"]
JOIN = "def join(a, b, out):\n    out.set((a + '+' + b).upper()[-30:])"
ENGINE = SimConfig.model_validate(
    {
        "tasks_capacity": 6,
        "instance": {"num_kv_cache_blocks": 96, "block_size": 16, "max_seq_len": 1200},
    }
)


class Story(World):
    def __init__(self, rng: random.Random, cluster: SimCluster) -> None:
        super().__init__(cluster)
        self.rng = rng

    async def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            await self.step()
            self.core.check_integrity()
            if self.rng.random() < 0.5:  # otherwise the next step is in the same loop turn
                await asyncio.sleep(self.rng.choice([0.0, 0.001, 0.006, 0.03, 0.2]))
                self.core.check_integrity()
                self.check_readers()
        await self.end()

    async def step(self) -> None:
        if not self.programs:
            self.begin()
        program = self.rng.choice(self.programs)
        steps = [self.begin, self.lose, self.join, self.slow, self.wait, self.delete, self.give_up]
        weights = [4, 2, 4, 2, 4, 2, 10]
        if program.var_ids:
            steps += [self.read, self.stream, self.race, self.cancel, self.set_value]
            weights += [16, 8, 10, 1, 4]
        steps += [self.create, self.call, self.repeat, self.native]
        weights += [6, 24, 24, 6]
        [step] = self.rng.choices(steps, weights)
        try:
            result = step() if step in self.common() else step(program)  # type: ignore[operator]
            if result is not None:
                await result
        except (SessionGone, NotFound):
            assert self.core.sessions.find(program.scope["session_id"]) is None
            self.programs.remove(program)

    def common(self) -> tuple[Any, ...]:
        return (self.begin, self.lose, self.join, self.slow, self.wait, self.give_up)

    # Sessions and engines

    def begin(self) -> None:
        if len(self.programs) < 4:
            tenant = self.rng.choice(TENANTS)
            created = self.core.create_session(SessionCreateRequest(api_key=tenant))
            session = self.core.sessions.find(created.session_id)
            assert session is not None
            self.programs.append(Program(created.model_dump(), session))

    def delete(self, program: Program) -> None:
        self.core.delete_session(**program.scope)
        self.programs.remove(program)

    async def lose(self) -> None:
        if len(self.engines) > 1 or self.rng.random() < 0.15:
            for engine in self.rng.sample(self.engines, min(1, len(self.engines))):
                self.num_engines_lost += 1
                await engine.kill()
            self.was_without_engines |= not self.engines

    async def join(self) -> None:
        if len(self.engines) < 3:
            await self.cluster.add_engine()

    def slow(self) -> None:
        for engine in self.engines:
            engine.slow_down(self.rng.choice([1.0, 1.0, 5.0]))

    async def wait(self) -> None:
        await asyncio.sleep(self.rng.choice([0.5, 2.0, 12.0, LIFE_SPAN_S / 2]))

    # Steps of programs

    def some(self, program: Program) -> str:
        """Pick a variable, preferably a late one, so that long chains develop."""
        at = max(self.rng.randrange(len(program.var_ids)) for _ in range(2))
        return program.var_ids[at]

    def create(self, program: Program) -> None:
        text = self.rng.choice([*VALUES, None])
        var_id = self.core.create_var(*program.scope.values(), "v", text)
        program.var_ids.append(var_id)
        if text is not None:
            self.reference.rules[var_id] = text

    def set_value(self, program: Program) -> None:
        var_id, text = self.some(program), self.rng.choice(VALUES)
        try:
            self.core.set_var(*program.scope.values(), var_id, text)
        except (AlreadySet, Conflict):
            return
        self.reference.rules[var_id] = text

    def call(self, program: Program) -> None:
        rng = self.rng
        pieces: list[str | Place] = [rng.choice(PREFIXES)]
        for _ in range(rng.randrange(4) if program.var_ids else 0):
            pieces += [Place(self.some(program)), " and "]
        lengths = [rng.choice([1, 2, 5, 9, 40])]
        lengths += [rng.choice([1, 3]) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
        options = {
            "successor_of": rng.choice([None, None, None, *program.requests[-3:]]),
            "remove_pure_fill": rng.random() < 0.7,
            "cache_prefix": rng.random() < 0.8,
            "reuse": rng.random() < 0.8,
        }
        sampling = rng.choice([{"temperature": 0.0}, {"temperature": 0.0}, {"seed": 1}, {}])
        self._submit(program, CallPlan(tuple(pieces), tuple(lengths), sampling, options))

    def repeat(self, program: Program) -> None:
        """Repeat a call of this program, or a constant call of another program."""
        others = [plan for other in self.programs for plan in other.plans if plan.is_constant]
        plans = [*program.plans[-8:], *others[-8:]]
        if plans:
            self._submit(program, self.rng.choice(plans))

    def _submit(self, program: Program, plan: CallPlan) -> None:
        rng = self.rng
        template, parameters = plan.template(self._premade(program))
        body = plan.options | {"template": template, "parameters": parameters}
        if rng.random() < 0.3:
            body["output_criteria"] = rng.choice(list(PerformanceCriteria)).value
        try:
            response = self.core.submit_call(SemanticCallRequest(**program.scope, **body))
        except (CyclicGraph, AlreadySet, Conflict):
            return
        prompt = [*program.contexts.get(plan.options["successor_of"], ()), *plan.pieces]
        for length, var_id in zip(plan.lengths, _outputs(response), strict=True):
            prompt.append(" then ")
            self.reference.rules[var_id] = Output(tuple(prompt), length)
            prompt.append(Place(var_id))
            self._know(program, var_id)
        if "output_criteria" in body:
            program.wanted.add(_outputs(response)[-1])
        program.plans.append(plan)
        program.requests.append(response.request_id)
        tail = () if plan.options["remove_pure_fill"] else (" end.",)
        program.contexts[response.request_id] = (*prompt, *tail)

    def _premade(self, program: Program) -> str | None:
        unset = [v for v in program.var_ids if v not in self.reference.rules]
        return self.rng.choice(unset) if unset and self.rng.random() < 0.5 else None

    def native(self, program: Program) -> None:
        if not program.var_ids:
            return
        first, second = self.some(program), self.some(program)
        body = {
            "func_name": "join",
            "func_source": JOIN,
            "parameters": [
                {"name": "a", "var_id": first},
                {"name": "b", "var_id": second},
                {"name": "out", "is_output": True},
            ],
        }
        response = self.core.submit_native(NativeCallRequest(**program.scope, **body))
        [var_id] = _outputs(response)
        self.reference.rules[var_id] = Joined(Place(first), Place(second))
        self._know(program, var_id)

    def _know(self, program: Program, var_id: str) -> None:
        if var_id not in program.var_ids:
            program.var_ids.append(var_id)

    def _options(self) -> dict[str, Any]:
        rng = self.rng
        return {
            "criteria": rng.choice(list(PerformanceCriteria)),
            "timeout": rng.choice([None, None, None, 0.05, 1.0, 30.0]),
            "deadline": rng.choice([None, None, 0.1, 5.0]),
        }

    def _start(
        self,
        program: Program,
        var_ids: list[str],
        options: dict[str, Any],
        coroutine: Coroutine[Any, Any, dict[str, str]],
        num_wanted: int = 1,
    ) -> None:
        task = asyncio.ensure_future(coroutine)
        is_timed = options["timeout"] is not None
        self.reads.append(Read(program, task, var_ids, is_timed, num_wanted))

    def read(self, program: Program) -> None:
        var_id, options = self.some(program), self._options()

        async def read() -> dict[str, str]:
            return {var_id: (await self.core.read(request, var_id)).content}

        request = VarGetRequest(**program.scope, **options)
        self._start(program, [var_id], options, read())

    def stream(self, program: Program) -> None:
        var_id, options = self.some(program), self._options()

        async def stream() -> dict[str, str]:
            return {var_id: "".join([text async for text in self.core.stream(request, var_id)])}

        request = VarGetRequest(**program.scope, **options)
        self._start(program, [var_id], options, stream())

    def race(self, program: Program) -> None:
        var_ids = self.rng.sample(
            program.var_ids, self.rng.randint(1, min(6, len(program.var_ids)))
        )
        k, options = self.rng.randint(1, len(var_ids)), self._options()

        async def race() -> dict[str, str]:
            answer = await self.core.first(request)
            return {value.var_id: value.content for value in answer.values}

        request = FirstVarsRequest(**program.scope, var_ids=var_ids, k=k, **options)
        self._start(program, var_ids, options, race(), k)

    def cancel(self, program: Program) -> None:
        scope = program.scope.values()
        if program.requests and self.rng.random() < 0.4:
            request_id = self.rng.choice(program.requests)
            self.core.cancel_call(*scope, request_id)  # Raises `SessionGone` after its life span.
            call = program.session.graph.calls[request_id]
            program.cancelled |= {out.id for task in call.tasks for out in task.outputs}
        else:
            var_id = self.some(program)
            producer = program.session.graph.variable(var_id).producer
            outputs = [] if producer is None else [out.id for out in producer.outputs]
            program.cancelled |= {var_id, *outputs}
            self.core.cancel_var(*scope, var_id)

    async def give_up(self) -> None:
        waiting = [read for read in self.reads if not read.task.done()]
        if waiting:
            read = self.rng.choice(waiting)
            self.reads.remove(read)
            read.task.cancel()
            [result] = await asyncio.gather(read.task, return_exceptions=True)
            if not isinstance(result, asyncio.CancelledError):
                self.check(read)

    # The end

    async def end(self) -> None:
        """Check that all reads end when an engine is available and nothing interferes, and that
        everything is freed after all sessions have ended."""
        if not self.engines:
            await self.cluster.add_engine()
        await asyncio.sleep(2 * HEARTBEAT_S)
        self.check_all_done()
        await asyncio.sleep(LIFE_SPAN_S + 40.0)  # reads without a producer end with the session
        for read in self.reads:
            assert read.task.done(), f"a read of {read.var_ids} still waits"
            self.check(read)
        await self.leave()

    async def leave(self) -> None:
        for program in self.programs:
            if self.core.sessions.find(program.scope["session_id"]) is not None:
                self.core.delete_session(**program.scope)
        await asyncio.sleep(1.0)
        self.cluster.check_integrity()
        self.check_contexts()
        await asyncio.sleep(4 * PREFIX_TIMEOUT_S)  # a context is freed after its forks
        self.cluster.check_integrity()
        self.check_contexts()
        dispatcher = self.core.dispatcher
        assert not dispatcher._ledger.owners.context_ids()
        assert dispatcher._ledger.think_times.num_open == 0
        assert dispatcher.num_queued == 0
        assert all(view.num_running == 0 for view in dispatcher.fleet.views())
        assert len(self.core._timers) == 0


def _outputs(response: CallResponse) -> list[str]:
    return [info.var_id for info in response.param_info if info.is_output]


async def tell(rng: random.Random, num_steps: int) -> None:
    scheduler = GlobalSchedulerConfig(
        reuse_results=rng.random() < 0.7,
        eager_fill=rng.random() < 0.7,
        kv_eviction=rng.choice(get_args(KvEviction)),
        policy=rng.choice(get_args(OrderName)),
        placement=rng.choice(["predicted", *get_args(PlacementName)]),
    )
    core = CoreConfig(
        global_scheduler=scheduler,
        session_life_span=LIFE_SPAN_S,
        engine_heartbeat_timeout=HEARTBEAT_S,
        constant_prefix_var_timeout=PREFIX_TIMEOUT_S,
    )
    leaps = rng.random() < 0.5
    async with SimCluster(rng.randint(1, 3), engine=ENGINE, core=core, leaps=leaps) as cluster:
        story = Story(rng, cluster)
        try:
            await story.run(num_steps)
        finally:
            for read in story.reads:
                read.task.cancel()
            await asyncio.gather(*(read.task for read in story.reads), return_exceptions=True)
