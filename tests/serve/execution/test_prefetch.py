"""Prefetch: ready prefixes of waiting calls are filled ahead."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parrot.engine.config import SimConfig
from parrot.protocol.engine_api import FillRequest
from parrot.protocol.errors import EngineFailed, OutOfMemory, PromptTooLong
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.public import SemanticCallRequest
from parrot.protocol.serve_client import ServeClient
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig
from parrot.serve.execution.prefetch import PrefetchCounts
from parrot.serve.scheduling.placement import Choice
from parrot.simulation import PATIENT, SimCluster, run_virtual

COSTS = {"step_s": 0.01, "prefill_token_s": 1e-4, "sequence_s": 0.0, "context_token_s": 0.0}
ENGINE = SimConfig.model_validate({"instance": COSTS, "scheduler": {"prefix_caching": False}})
BLOCK = 16
LONG = "a long story " * 100  # 1,300 tokens: a token of the sim engine is a byte.


class Program:
    def __init__(self, cluster: SimCluster, client: ServeClient) -> None:
        self.cluster = cluster
        self.client = client
        self.scope: dict[str, Any] = {}

    async def begin(self) -> "Program":
        self.scope = (await self.client.create_session()).model_dump()
        return self

    async def var(self, content: str | None = None) -> str:
        return await self.client.create_var(**self.scope, var_name="v", content=content)

    async def set(self, var_id: str, content: str) -> None:
        await self.client.set_var(**self.scope, var_id=var_id, content=content)

    async def call(self, template: str, length: int = 5, **options: Any) -> str:
        """Placeholders except `out` are variable ids."""
        inputs = {
            name: options.pop(name) for name in list(options) if f"{{{{{name}}}}}" in template
        }
        parameters: list[dict[str, Any]] = [{"name": n, "var_id": v} for n, v in inputs.items()]
        sampling = {"max_gen_length": length}
        parameters.append({"name": "out", "is_output": True, "sampling_config": sampling})
        request = self.scope | {"template": template, "parameters": parameters} | options
        response = await self.client.semantic_call(SemanticCallRequest.model_validate(request))
        return response.param_info[-1].var_id

    def reading(self, var_id: str) -> "asyncio.Task[str]":
        criteria = PerformanceCriteria.LATENCY
        return asyncio.create_task(
            self.client.get_var(**self.scope, var_id=var_id, criteria=criteria)
        )

    async def usage(self) -> tuple[int, int]:
        """Cached and computed tokens of the session's last completion."""
        info = self.cluster.core.session_info(self.scope["session_id"], self.scope["session_auth"])
        last = info.calls[-1]
        return last.cached_tokens, last.computed_tokens

    @property
    def counts(self) -> PrefetchCounts:
        return self.cluster.core.dispatcher.prefetch_counts


def core(**scheduler: Any) -> CoreConfig:
    return PATIENT.model_copy(update={"global_scheduler": GlobalSchedulerConfig(**scheduler)})


def simulate(
    body: Callable[[Program], Awaitable[Any]],
    num_engines: int = 1,
    engine: SimConfig = ENGINE,
    **scheduler: Any,
) -> Any:
    async def main() -> Any:
        options: dict[str, Any] = {"engine": engine, "core": core(**scheduler), "engine_rtt_s": 0.0}
        async with SimCluster(num_engines, **options) as cluster:
            program = await Program(cluster, cluster.client()).begin()
            result = await body(program)
            await asyncio.sleep(5)
            cluster.check_integrity()
            await program.client.delete_session(**program.scope)
            await asyncio.sleep(1)
            cluster.check_integrity()
            return result

    return run_virtual(main())


async def ask_late(program: Program, content: str = LONG, **options: Any) -> tuple[str, int, int]:
    """The answer to a question that is set after 2 s, and its cached and computed tokens."""
    question = await program.var()
    template = "Read: {{story}} and say: {{question}} {{out}}"
    story = await program.var(content)
    answer = await program.call(template, story=story, question=question, **options)
    reading = program.reading(answer)
    await asyncio.sleep(2)
    await program.set(question, "Who?")
    text = await reading
    return text, *await program.usage()


@pytest.mark.parametrize("options", [{}, {"cache_prefix": False}])
def test_only_the_late_part_is_computed_after_its_input(options):
    async def body(program: Program) -> tuple[str, int, int, PrefetchCounts]:
        return *await ask_late(program, **options), program.counts

    text, cached, computed, counts = simulate(body)
    assert computed < len(" and say: Who? ") + BLOCK
    assert counts.filled == counts.used == cached
    assert counts.wasted == 0
    off_text, off_cached, _, off_counts = simulate(body, eager_fill=False)
    assert (text, off_cached, off_counts.filled) == (off_text, 0, 0)


def test_a_prefix_is_filled_next_to_streams_and_the_answer_starts_earlier():
    """Without the fill, a prompt of this length would be delayed because of the streams."""
    costs = {"prefill_token_s": 1.6e-5, "sequence_s": 1e-5, "context_token_s": 4e-8}
    instance = ENGINE.instance.model_copy(update={"step_s": 0.0045, **costs})

    async def bystand(program: Program, name: str) -> None:
        while True:
            await program.reading(await program.call(f"{name} {LONG[:250]} {{{{out}}}}", 100))

    async def body(program: Program) -> tuple[float, int]:
        others = [await Program(program.cluster, program.client).begin() for _ in range(8)]
        bystanders = [asyncio.create_task(bystand(p, f"{i}")) for i, p in enumerate(others)]
        await asyncio.sleep(5)
        story, question = await program.var(6 * LONG), await program.var()
        template = "{{story}} {{question}} {{out}}"
        reading = program.reading(await program.call(template, story=story, question=question))
        await asyncio.sleep(2)
        await program.set(question, "Who?")
        began = program.cluster.clock.now()
        await reading
        taken = program.cluster.clock.now() - began
        for bystander in bystanders:
            bystander.cancel()
        await asyncio.gather(*bystanders, return_exceptions=True)
        return taken, program.counts.used

    engine = ENGINE.model_copy(update={"instance": instance})
    taken_s, num_used = simulate(body, engine=engine)
    without_s, _ = simulate(body, engine=engine, eager_fill=False)
    assert num_used > 5 * len(LONG)
    assert taken_s < 0.85 * without_s


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_call_without_a_reader_is_filled_where_its_session_has_the_most_kv(is_asked):
    """The next turn of a chat. A background call would be placed on the other engine. But the
    program will read the turn as soon as its tool has returned."""

    async def body(program: Program) -> int:
        story, result = await program.var(LONG), await program.var()
        answer = await program.call("{{story}}{{out}}", story=story)
        template = "{{story}}{{answer}}{{result}}{{out}}"
        last = await program.call(template, story=story, answer=answer, result=result)
        reading = [program.reading(last)] if is_asked else []
        dispatcher = program.cluster.core.dispatcher
        with patch.object(dispatcher._scheduler._placer, "preview") as preview:
            preview.side_effect = lambda task, now: next(
                Choice(load, task.prompt_len)
                for load in dispatcher._scheduler.engines
                if dispatcher._ledger.index.match(load.id, task.keys) is None
            )
            await program.reading(answer)
            await asyncio.sleep(1)
        await program.set(result, "It rains.")
        await asyncio.gather(*reading)
        return program.counts.filled

    num_filled = simulate(body, num_engines=2)
    assert num_filled > len(LONG) if is_asked else num_filled == 0


async def read_later(program: Program, story: str, **options: Any) -> tuple[int, int]:
    """The cached and computed tokens of a call that has no reader until it is ready."""
    question = await program.var()
    template = "{{story}} {{question}} {{out}}"
    answer = await program.call(template, story=story, question=question, **options)
    await asyncio.sleep(1)
    await program.set(question, "Who?")
    await program.reading(answer)
    return await program.usage()


def test_a_call_without_a_reader_is_not_filled_on_a_draining_engine():
    async def body(program: Program) -> tuple[int, int]:
        story = await program.var(LONG)
        await program.reading(await program.call("{{story}}{{out}}", story=story))
        core = program.cluster.core
        (used,) = [view for view in core.dispatcher.fleet.views() if view.num_contexts]
        core.dispatcher.drains.drain(used.id, is_draining=True)
        return await read_later(program, story)

    cached, computed = simulate(body, num_engines=2)
    assert cached >= len(LONG)
    assert computed < 2 * BLOCK


@pytest.mark.parametrize("first_model", ["sim", "two"])
def test_a_call_without_a_reader_is_filled_on_an_engine_with_its_model(first_model):
    """The session holds the prompt on an engine with another model."""

    async def body(program: Program) -> tuple[int, int]:
        await program.cluster.add_engine(model="two")
        story = await program.var(LONG)
        first = await program.call("{{story}}{{out}}", story=story, models=[first_model])
        await program.reading(first)
        return await read_later(program, story, models=["two"])

    cached, computed = simulate(body)
    assert cached >= len(LONG)
    assert computed < 2 * BLOCK


def test_the_filled_prefix_grows_with_each_input():
    async def body(program: Program) -> tuple[int, int]:
        parts = [await program.var() for _ in range(4)]
        names = ["a", "b", "c", "d"]
        template = "".join(f"{{{{{name}}}}} " for name in names) + "{{out}}"
        answer = await program.call(template, **dict(zip(names, parts, strict=True)))
        reading = program.reading(answer)
        for part in parts:
            await asyncio.sleep(1)
            await program.set(part, LONG)
        await reading
        return await program.usage()

    cached, computed = simulate(body)
    assert cached >= 3 * len(LONG)
    assert computed <= len(LONG) + 3 + BLOCK


def test_an_input_that_becomes_ready_during_a_fill_is_filled_after_it():
    async def body(program: Program) -> tuple[int, int]:
        question, later, story = [await program.var(c) for c in (None, None, LONG * 10)]
        template = "{{story}} {{later}} {{question}} {{out}}"
        answer = await program.call(template, story=story, later=later, question=question)
        reading = program.reading(answer)
        await asyncio.sleep(0.2)
        assert program.counts.filled == 0
        await program.set(later, LONG)
        await asyncio.sleep(10)
        await program.set(question, "Who?")
        await reading
        return await program.usage()

    cached, computed = simulate(body)
    assert cached > 11 * len(LONG)
    assert computed < 3 * BLOCK


def test_short_pieces_are_not_filled():
    async def body(program: Program) -> PrefetchCounts:
        question = await program.var()
        answer = await program.call("Say {{question}} {{out}}", question=question)
        reading = program.reading(answer)
        await asyncio.sleep(1)
        await program.set(question, "no")
        await reading
        return program.counts

    assert simulate(body) == PrefetchCounts()


def test_fills_of_a_withdrawn_call_are_freed():
    async def body(program: Program) -> tuple[PrefetchCounts, int]:
        question, story = await program.var(), await program.var(LONG)
        template = "{{story}} {{question}} {{out}}"
        answer = await program.call(template, story=story, question=question)
        reading = program.reading(answer)
        await asyncio.sleep(1)
        reading.cancel()
        await asyncio.sleep(1)
        engine = next(iter(program.cluster.engines.values()))
        return program.counts, engine.service.runtime_info().num_cached_tokens

    counts, num_tokens = simulate(body)
    assert counts.wasted == counts.filled > len(LONG)
    assert num_tokens == 0


def test_a_fill_in_flight_is_cancelled_with_its_call():
    async def body(program: Program) -> tuple[PrefetchCounts, int]:
        question, story = await program.var(), await program.var(LONG * 10)
        template = "{{story}} {{question}} {{out}}"
        answer = await program.call(template, story=story, question=question)
        reading = program.reading(answer)
        await asyncio.sleep(0.2)
        reading.cancel()
        await asyncio.sleep(1)
        engine = next(iter(program.cluster.engines.values()))
        return program.counts, engine.service.runtime_info().num_steps

    counts, num_steps = simulate(body)
    assert counts.filled == 0
    assert num_steps < len(LONG) * 10 / 512 / 2


def test_a_completion_that_becomes_ready_continues_a_fill_in_flight():
    async def body(program: Program) -> tuple[float, int]:
        question, story = await program.var(), await program.var(LONG * 4)
        template = "{{story}} {{question}} {{out}}"
        answer = await program.call(template, story=story, question=question)
        reading = program.reading(answer)
        await asyncio.sleep(0.3)
        began = program.cluster.clock.now()
        await program.set(question, "Who?")
        await reading
        return program.cluster.clock.now() - began, program.counts.used

    with_it, used = simulate(body)
    without, _ = simulate(body, eager_fill=False)
    assert used >= len(LONG) * 4
    assert with_it < without - 0.1


def test_a_call_that_becomes_ready_does_not_wait_for_an_unsent_fill():
    """The constant prefix and the story are two contexts. The first one takes longer."""

    async def body(program: Program) -> tuple[float, int, int]:
        stream = await program.call("Hello {{out}}", length=400)
        reading = program.reading(stream)
        await asyncio.sleep(0.5)
        question, story = await program.var(), await program.var(LONG)
        constant = LONG * 5
        answer = await program.call(
            constant + "{{story}} {{question}} {{out}}", story=story, question=question
        )
        waiting = program.reading(answer)
        await asyncio.sleep(0.1)
        began = program.cluster.clock.now()
        await program.set(question, "Who?")
        await waiting
        took_s = program.cluster.clock.now() - began
        reading.cancel()
        info = await program.client.session_info(**program.scope)
        return took_s, info.calls[-1].attempts, program.counts.used

    with_it, attempts, used = simulate(body)
    assert attempts == 1
    assert used > len(LONG) * 5
    assert with_it <= simulate(body, eager_fill=False)[0]


def test_fills_lower_ttft_and_hardly_slow_down_streams():
    """Only the late part of the prompt decides whether the call waits for the streams."""

    async def body(program: Program) -> tuple[float, float, PrefetchCounts]:
        other = await Program(program.cluster, program.cluster.client()).begin()
        clock, began = program.cluster.clock, program.cluster.clock.now()
        streams = [
            other.reading(await other.call(f"{i} {{{{out}}}}", length=600)) for i in range(8)
        ]
        await asyncio.sleep(0.5)
        question, story = await program.var(), await program.var(LONG)
        template = "{{story}} {{question}} {{out}}"
        answer = await program.call(template, length=1, story=story, question=question)
        waiting = program.reading(answer)
        await asyncio.sleep(6)
        asked = clock.now()
        await program.set(question, "Who?")
        await waiting
        answered_s = clock.now() - asked
        await asyncio.gather(*streams)
        return answered_s, clock.now() - began, program.counts

    engine = ENGINE.model_copy(
        update={"scheduler": ENGINE.scheduler.model_copy(update={"background_share": 0.2})}
    )
    with_it, streams_s, counts = simulate(body, engine=engine)
    without, alone_s, _ = simulate(body, engine=engine, eager_fill=False)
    assert counts.used == counts.filled > len(LONG)
    assert with_it < 0.8 * without
    assert streams_s < 1.1 * alone_s


def test_tenants_do_not_share_fills():
    """They share neither contexts in ServeCore nor blocks in the engine."""
    salts: list[str] = []

    async def body(program: Program) -> tuple[int, ...]:
        (engine,) = program.cluster.engines.values()
        fill = engine.client.fill

        async def record(request: FillRequest) -> Any:
            salts.append(request.cache_salt)
            return await fill(request)

        engine.client.fill = record  # type: ignore[method-assign]
        computed = []
        for api_key in ("acme", "rival"):
            tenant = Program(program.cluster, program.cluster.client())
            tenant.scope = (await tenant.client.create_session(api_key=api_key)).model_dump()
            filled = program.counts.filled
            await ask_late(tenant)
            computed.append(program.counts.filled - filled)
        return tuple(computed)

    caching = ENGINE.model_copy(
        update={"scheduler": ENGINE.scheduler.model_copy(update={"prefix_caching": True})}
    )
    first, second = simulate(body, engine=caching)
    assert first == second > len(LONG)
    assert len(set(salts)) == 2


def test_fills_of_lost_engines_are_dropped():
    async def body(program: Program) -> tuple[str, PrefetchCounts]:
        question, story = await program.var(), await program.var(LONG)
        template = "{{story}} {{question}} {{out}}"
        answer = await program.call(template, story=story, question=question)
        reading = program.reading(answer)
        await asyncio.sleep(1)
        engines = list(program.cluster.engines.values())
        holder = next(e for e in engines if e.service.runtime_info().num_cached_tokens)
        await holder.kill()
        await program.set(question, "Who?")
        return await reading, program.counts

    text, counts = simulate(body, num_engines=2)
    assert len(text) == 5
    assert counts.used == counts.filled  # Counted when the call was placed.


def test_a_fill_that_the_engine_rejects_has_no_other_effect():
    async def body(program: Program) -> tuple[str, int, int]:
        for engine in program.cluster.engines.values():

            async def refuse(request: Any) -> Any:
                raise OutOfMemory("there is no room for a background fill")

            engine.client.fill = refuse  # type: ignore[method-assign]
        return await ask_late(program)

    text, cached, _ = simulate(body)
    assert (len(text), cached) == (5, 0)


def test_a_fill_evicts_no_context_with_an_expected_use():
    small = ENGINE.model_copy(
        update={"instance": ENGINE.instance.model_copy(update={"num_kv_cache_blocks": 160})}
    )

    async def body(program: Program) -> tuple[int, int]:
        late = [await program.var() for _ in range(2)]
        readings = []
        for question in late:
            story = await program.var(f"{question} {LONG}")
            answer = await program.call(
                "{{story}} {{question}} {{out}}", story=story, question=question
            )
            readings.append(program.reading(answer))
            await asyncio.sleep(1)
        filled = program.counts.filled
        for question in late:
            await program.set(question, "Who?")
        await asyncio.gather(*readings)
        return filled, program.counts.wasted

    filled, wasted = simulate(body, engine=small)
    assert len(LONG) < filled < 2 * len(LONG)  # Only one fill fits.
    assert wasted == 0


async def share_of(program: Program, *, from_call: bool) -> float | None:
    """The share of a fill whose completion waits for the program or for a call. None: no fill was
    sent."""
    links = [engine.client for engine in program.cluster.engines.values()]
    fills = [link.fill for link in links]
    shares: list[float] = []

    def recording(fill: Any) -> Any:
        async def record(request: FillRequest) -> Any:
            shares.append(request.background_share)
            return await fill(request)

        return record

    for link, fill in zip(links, fills, strict=True):
        link.fill = recording(fill)  # type: ignore[method-assign]
    question = await program.var()
    story = await program.var(f"{question} {LONG * 10}")
    if from_call:
        question = await program.call("Ask anything {{out}}", length=20)
    answer = await program.call("{{story}} {{question}} {{out}}", story=story, question=question)
    reading = program.reading(answer)
    await asyncio.sleep(0.1)
    for link, fill in zip(links, fills, strict=True):
        link.fill = fill  # type: ignore[method-assign]
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return shares[0] if shares else None


def test_fills_of_calls_that_wait_only_for_calls_get_a_larger_share():
    async def body(program: Program) -> list[float]:
        return [await share_of(program, from_call=from_call) for from_call in (False, True)]

    assert simulate(body, num_engines=2) == [pytest.approx(0.02), pytest.approx(0.2)]


def test_a_fill_does_not_delay_the_calls_that_its_completion_waits_for():
    async def body(program: Program) -> float | None:
        return await share_of(program, from_call=True)

    assert simulate(body) is None


def test_used_fills_raise_the_share_and_withdrawn_ones_lower_it():
    async def body(program: Program) -> list[float]:
        shares = []
        for i in range(12):
            await ask_late(program, f"{i} {LONG * 4}")
        shares.append(await share_of(program, from_call=False))  # Each is withdrawn.
        for _ in range(4):
            shares.append(await share_of(program, from_call=False))
        return shares

    shares = simulate(body)
    assert shares[0] > 0.05
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.03


def test_fills_hardly_slow_down_other_calls():
    async def body(program: Program) -> float:
        other = await Program(program.cluster, program.cluster.client()).begin()
        stream = await other.call("Hello {{out}}", length=400)
        reading = other.reading(stream)
        await asyncio.sleep(1)
        question, story = await program.var(), await program.var(LONG * 5)
        answer = await program.call(
            "{{story}} {{question}} {{out}}", story=story, question=question
        )
        waiting = program.reading(answer)
        began = program.cluster.clock.now()
        await reading
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return program.cluster.clock.now() - began

    assert simulate(body) <= 1.03 * simulate(body, eager_fill=False)


def test_chat_markup_is_the_same_as_in_the_whole_prompt():
    async def body(program: Program) -> tuple[str, int, int]:
        return await ask_late(program, chat=True)

    text, _, computed = simulate(body)
    assert text == simulate(body, eager_fill=False)[0]
    assert computed < 100


class Chance:
    """Random programs: inputs in random order, readers that leave, and engines that are lost."""

    def __init__(self, program: Program, data: st.DataObject) -> None:
        self.program = program
        self.data = data
        self.missing: list[str] = []
        self.readings: list[asyncio.Task[str]] = []

    async def step(self) -> None:
        verbs = [self.call, self.call, self.give, self.give, self.give, self.leave, self.lose]
        await self.data.draw(st.sampled_from(verbs))()
        await asyncio.sleep(self.data.draw(st.sampled_from([0.0, 0.003, 0.05, 0.5])))

    async def call(self) -> None:
        names = "abcd"[: self.data.draw(st.integers(1, 4))]
        variables = {}
        for name in names:
            if self.missing and self.data.draw(st.booleans()):
                variables[name] = self.data.draw(st.sampled_from(self.missing))
            elif self.data.draw(st.booleans()):
                variables[name] = await self.program.var(LONG)
            else:
                variables[name] = await self.program.var()
                self.missing.append(variables[name])
        template = " and ".join(f"{{{{{name}}}}}" for name in names) + " {{out}}"
        constant = LONG[: self.data.draw(st.sampled_from([0, 10, 400]))]
        answer = await self.program.call(constant + template, cache_prefix=False, **variables)
        self.readings.append(self.program.reading(answer))

    async def give(self) -> None:
        if self.missing:
            index = self.data.draw(st.integers(0, len(self.missing) - 1))
            text = LONG * self.data.draw(st.integers(0, 2))
            await self.program.set(self.missing.pop(index), text)

    async def leave(self) -> None:
        if self.readings:
            self.data.draw(st.sampled_from(self.readings)).cancel()

    async def lose(self) -> None:
        cluster = self.program.cluster
        await cluster.add_engine()
        alive = [engine for engine in cluster.engines.values() if engine.is_alive]
        await self.data.draw(st.sampled_from(alive)).kill()

    async def end(self) -> None:
        for var_id in self.missing:
            await self.program.set(var_id, "the end")
        answers = await asyncio.gather(*self.readings, return_exceptions=True)
        errors = (
            asyncio.CancelledError,
            EngineFailed,
            PromptTooLong,
        )  # Too many engines were lost.
        assert all(isinstance(answer, (str, *errors)) for answer in answers), answers

    async def abandon(self) -> None:
        """Cancel all reads after Hypothesis has stopped an example that draws too much."""
        for reading in self.readings:
            reading.cancel()
        await asyncio.gather(*self.readings, return_exceptions=True)


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_random_programs_leave_no_state(data: st.DataObject):
    blocks = data.draw(st.sampled_from([250, 400, 4000]))
    instance = ENGINE.instance.model_copy(update={"num_kv_cache_blocks": blocks})

    async def body(program: Program) -> None:
        chance = Chance(program, data)
        try:
            for _ in range(data.draw(st.integers(1, 25))):
                await chance.step()
            await chance.end()
        finally:
            await chance.abandon()
        await program.client.delete_session(**program.scope)
        await asyncio.sleep(1)
        for engine in program.cluster.engines.values():
            if engine.is_alive:
                assert engine.service.runtime_info().num_cached_tokens == 0
        counts = program.counts
        assert counts.filled == counts.used + counts.wasted
        await program.begin()

    simulate(body, num_engines=2, engine=ENGINE.model_copy(update={"instance": instance}))
