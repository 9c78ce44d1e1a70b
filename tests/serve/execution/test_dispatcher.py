"""From a submitted completion to its settled output: results, order and cancelling."""

import asyncio

from parrot.protocol.errors import Cancelled
from parrot.protocol.fields import PerformanceCriteria
from parrot.serve.graph.nodes import CompletionState, Objective, SemanticVariable
from tests.serve.execution.world import TOKENIZER_ID, World, value
from tests.support.fake_engine import Script, fake_engine


async def test_a_completion_gets_its_output_and_statistics(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    completion = world.submit("Say ", value("hi"), " now: ")
    assert completion.state is CompletionState.QUEUED
    assert await completion.output.wait() == "<12>"
    assert engine.prompts == ["Say hi now: "]
    assert completion.state is CompletionState.DONE
    assert completion.stats.engine_name == "fake"
    assert completion.stats.model == "tiny"
    assert completion.stats.attempts == 1
    assert completion.stats.output_tokens == 5
    assert completion.stats.computed_tokens == 8  # After the constant prefix.
    assert completion.times.started is not None
    assert completion.times.finished is not None
    tokenized = completion.output.tokenized
    assert tokenized is not None
    assert tokenized.tokenizer_id == TOKENIZER_ID
    assert len(tokenized.ids) == 4  # Without the stop token.


async def test_the_state_is_consistent_before_the_output_is_set(world: World) -> None:
    await world.join(fake_engine())
    completion = world.completion("a")
    seen: list[CompletionState] = []

    def on_settled(variable: SemanticVariable) -> None:
        seen.append(completion.state)
        world.dispatcher.check_integrity()
        seen.append(world.submit("next").state)

    completion.output.on_settled(on_settled)
    world.dispatcher.submit(completion)
    await completion.output.wait()
    assert seen == [CompletionState.DONE, CompletionState.QUEUED]


async def test_the_request_has_the_calls_priority(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    patient = world.completion("Some time: ")
    patient.objective = Objective(PerformanceCriteria.THROUGHPUT, 0, 1.0)
    world.dispatcher.submit(patient)
    urgent = world.submit("Now: ", session=2)
    await asyncio.gather(patient.output.wait(), urgent.output.wait())
    priorities = dict(zip(engine.prompts, (r.priority for r in engine.requests), strict=True))
    assert priorities["Now: "] < priorities["Some time: "]


async def test_cancel_in_every_state(world: World) -> None:
    engine = fake_engine(tasks_capacity=1, script=Script(hang_after=0))
    await world.join(engine)
    running = world.submit("a ", value("b"))
    await world.settle()
    queued = world.submit("c")
    idle = world.completion("d")
    await world.settle()
    assert (running.state, queued.state) == (CompletionState.RUNNING, CompletionState.QUEUED)
    error = Cancelled("enough")
    for completion in (idle, queued, running):
        world.dispatcher.cancel(completion, error)
        assert completion.state is CompletionState.CANCELLED
        assert completion.output.error is error
        world.dispatcher.check_integrity()
    await world.clock.advance(0.1)
    assert engine.num_aborted == 1
    assert sorted(engine.freed) == sorted(f.context_id for f in engine.requests[0].fills)
    assert engine.contexts == {}
    engine.script = Script()
    done = world.submit("e")
    await done.output.wait()
    world.dispatcher.cancel(done, error)
    assert done.state is CompletionState.DONE


async def test_reprioritise(world: World) -> None:
    engine = fake_engine(tasks_capacity=1)
    first, second = world.completion("a", session=1), world.completion("b", session=1)
    slow = Objective(PerformanceCriteria.THROUGHPUT, 1, 0.0)
    first.objective = second.objective = slow
    world.dispatcher.submit(first)
    world.dispatcher.submit(second)
    second.objective = Objective(PerformanceCriteria.LATENCY, 0, 0.0)
    world.dispatcher.reprioritise(second)
    world.dispatcher.reprioritise(world.completion("unknown"))
    await world.join(engine)
    await first.output.wait()
    assert engine.prompts == ["b", "a"]
