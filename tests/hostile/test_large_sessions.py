"""Work on thousands of calls of a session is done in slices. Other requests run between the slices,
and no reader sees a half-finished state."""

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from parrot.protocol.errors import CyclicGraph, SessionGone
from parrot.protocol.public import GraphRequest, SessionCreateRequest, VarGetRequest
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.graph.nodes import CompletionState, Task
from parrot.serve.readers import value_view
from parrot.serve.sessions import Session
from tests.serve.execution.test_result_cache import World
from tests.support.manual_clock import ManualClock

NUM_CALLS = 1536
AT_ONCE = 512
MANY_TURNS = 64


class Large:
    """A session with many calls, without an engine. All calls read the first variable, or each call
    reads the output of the previous one (`is_chain`)."""

    def __init__(self, core: ServeCore, *, is_chain: bool) -> None:
        self.core = core
        self.scope = core.create_session(SessionCreateRequest())
        session = core.sessions.find(self.scope.session_id)
        assert session is not None
        self.session: Session = session
        self._tasks: list[Task] = []
        self.first = self.last = self.create("v")
        for _ in range(NUM_CALLS // AT_ONCE):
            given = self.last if is_chain else self.first
            calls = [
                {
                    "template": "{{a}}{{b}}",
                    "parameters": [
                        {"name": "a", "var": f"v{n}"}
                        if is_chain and n
                        else {"name": "a", "var_id": given},
                        {"name": "b", "is_output": True, "var": f"v{n + 1}"},
                    ],
                }
                for n in range(AT_ONCE)
            ]
            asked = {**self.scope.model_dump(), "calls": calls}
            answer = core.submit_graph(GraphRequest.model_validate(asked))
            self.last = answer.variables[f"v{AT_ONCE}"]

    def create(self, name: str) -> str:
        return self.core.create_var(*self._ids(), name, None)

    def cancel(self, var_id: str) -> None:
        self.core.cancel_var(*self._ids(), var_id)

    def set(self, var_id: str, text: str) -> None:
        self.core.set_var(*self._ids(), var_id, text)

    def read(self, var_id: str) -> "asyncio.Task[object]":
        request = VarGetRequest(**self.scope.model_dump())
        return asyncio.create_task(self.core.read(request, var_id))

    def end(self) -> None:
        self._tasks = self._all_tasks()  # the session forgets its calls when it ends
        self.core.delete_session(*self._ids())

    def count(self, *states: CompletionState) -> int:
        return sum(task.state in states for task in self._tasks or self._all_tasks())

    def _all_tasks(self) -> list[Task]:
        return [task for call in self.session.graph.calls.values() for task in call.tasks]

    def _ids(self) -> tuple[int, str]:
        return self.scope.session_id, self.scope.session_auth


@asynccontextmanager
async def large_session(*, is_chain: bool) -> AsyncIterator[Large]:
    core = ServeCore(CoreConfig(), clock=ManualClock())
    yield Large(core, is_chain=is_chain)
    core.check_integrity()
    await core.close()


async def slices(large: Large, count: Callable[[], int]) -> list[int]:
    """Return the growth of `count` in each turn of the event loop in which it grows. Checks the
    integrity of ServeCore after each turn."""
    grown, before = [], count()
    for _ in range(MANY_TURNS):
        await asyncio.sleep(0)
        if (now := count()) != before:
            grown.append(now - before)
            before = now
            large.core.check_integrity()
    return grown


@contextmanager
def at_most_a_slice(large: Large, count: Callable[[], int]) -> Iterator[None]:
    before = count()
    yield
    assert 0 < count() - before <= AT_ONCE


async def test_a_session_ends() -> None:
    async with large_session(is_chain=True) as large:

        def num_ended() -> int:
            return large.count(CompletionState.CANCELLED)

        reading = large.read(large.last)
        await asyncio.sleep(0)
        with at_most_a_slice(large, num_ended):
            large.end()
        with pytest.raises(SessionGone):
            large.create("w")
        assert large.session not in list(large.core.sessions)
        grown = await slices(large, num_ended)
        assert len(grown) >= NUM_CALLS // AT_ONCE - 1
        assert max(grown) <= AT_ONCE
        assert num_ended() == NUM_CALLS
        await slices(large, lambda: len(large.session.graph.variables))
        assert large.core.sessions.num_of(large.session.tenant) == 0
        with pytest.raises(SessionGone):
            await reading


async def test_a_variable_of_many_consumers_fails() -> None:
    async with large_session(is_chain=False) as large:

        def num_failed() -> int:
            return large.count(CompletionState.FAILED)

        reading = large.read(large.last)
        await asyncio.sleep(0)
        with at_most_a_slice(large, num_failed):
            large.cancel(large.first)
        assert max(await slices(large, num_failed)) <= AT_ONCE
        assert num_failed() == NUM_CALLS
        with pytest.raises(Exception, match="was cancelled"):
            await reading


async def test_a_session_ends_while_a_failure_spreads() -> None:
    async with large_session(is_chain=True) as large:
        reading = large.read(large.last)
        await asyncio.sleep(0)
        large.cancel(large.first)
        large.end()
        await slices(large, lambda: large.count(CompletionState.FAILED))
        assert large.count(CompletionState.CANCELLED, CompletionState.FAILED) == NUM_CALLS
        assert large.count(CompletionState.CANCELLED)
        with pytest.raises(SessionGone):
            await reading


async def test_a_call_that_is_cancelled_while_its_input_fails_stays_cancelled() -> None:
    async with large_session(is_chain=True) as large:
        large.cancel(large.first)
        large.cancel(large.last)
        await slices(large, lambda: large.count(CompletionState.FAILED))
        assert large.count(CompletionState.FAILED) == NUM_CALLS - 1
        assert large.count(CompletionState.CANCELLED) == 1


async def test_a_variable_of_many_consumers_is_set() -> None:
    async with large_session(is_chain=False) as large:
        readings = [large.read(large.last)]
        await asyncio.sleep(0)
        activation = large.session.graph.activation
        while activation.start_background():
            pass
        await slices(large, lambda: large.count(CompletionState.WAITING))
        with at_most_a_slice(large, lambda: activation.num_started):
            large.set(large.first, "text")
        assert max(await slices(large, lambda: activation.num_started)) <= AT_ONCE
        assert activation.num_started == NUM_CALLS
        large.end()
        await asyncio.gather(*readings, return_exceptions=True)


async def test_the_end_of_a_chain_is_read_and_left() -> None:
    async with large_session(is_chain=True) as large:

        def num_wanted() -> int:
            return large.count(CompletionState.WAITING)

        reading = large.read(large.last)
        assert 0 < max(await slices(large, num_wanted)) <= AT_ONCE
        assert num_wanted() == NUM_CALLS
        reading.cancel()
        assert 0 > min(await slices(large, num_wanted)) >= -AT_ONCE
        assert num_wanted() == 0


async def test_the_end_of_a_chain_is_left_before_all_of_it_is_wanted() -> None:
    async with large_session(is_chain=True) as large:
        reading = large.read(large.last)
        await asyncio.sleep(0)
        reading.cancel()
        await slices(large, lambda: large.count(CompletionState.WAITING))
        assert large.count(CompletionState.IDLE) == NUM_CALLS


async def test_the_error_of_a_cycle_of_thousands_of_calls_is_short() -> None:
    async with large_session(is_chain=True) as large:
        call = {
            "template": "{{a}}{{b}}",
            "parameters": [
                {"name": "a", "var_id": large.last},
                {"name": "b", "is_output": True, "var_id": large.first},
            ],
        }
        asked = {**large.scope.model_dump(), "calls": [call]}
        with pytest.raises(CyclicGraph, match=f"{NUM_CALLS - 30} more") as caught:
            large.core.submit_graph(GraphRequest.model_validate(asked))
        assert len(str(caught.value)) < 1000


async def test_thousands_of_calls_without_an_engine_fail() -> None:
    async with large_session(is_chain=False) as large:

        def num_idle() -> int:
            return large.count(CompletionState.IDLE)

        readings = [large.read(large.last)]
        await asyncio.sleep(0)
        while large.session.graph.activation.start_background():
            pass
        large.set(large.first, "text")
        await slices(large, lambda: large.session.graph.activation.num_started)
        clock = large.core.clock
        assert isinstance(clock, ManualClock)
        advancing = asyncio.create_task(clock.advance(large.core.config.unserved_timeout_s))
        assert max(await slices(large, num_idle)) <= AT_ONCE
        assert num_idle() == NUM_CALLS
        await asyncio.gather(advancing, *readings, return_exceptions=True)


def live_objects() -> Counter[str]:
    gc.collect()
    kinds = (type(one) for one in gc.get_objects())
    # A class may define its own __module__ (a property, say), so it need not be a string.
    return Counter(
        kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("parrot.")
    )


async def _use_and_end(core: ServeCore, clock: ManualClock) -> None:
    large = Large(core, is_chain=True)
    reading = large.read(large.last)
    await slices(large, lambda: large.count(CompletionState.WAITING))
    large.cancel(large.first)
    large.end()
    await slices(large, lambda: large.count(CompletionState.CANCELLED))
    await asyncio.gather(reading, return_exceptions=True)
    await clock.advance(1.0)  # fires all timers, which would keep objects alive


async def test_nothing_is_left_of_a_session_that_has_ended() -> None:
    clock = ManualClock()
    core = ServeCore(CoreConfig(), clock=clock)
    before = live_objects()
    await _use_and_end(core, clock)
    left = live_objects() - before
    assert left.total() < 30, left
    await core.close()


async def test_an_ended_session_leaves_no_reference_cycles() -> None:
    """The calls and variables of an open session reference each other."""
    clock = ManualClock()
    core = ServeCore(CoreConfig(), clock=clock)
    gc.collect()
    gc.disable()
    try:
        await _use_and_end(core, clock)
        assert gc.collect() < 100
    finally:
        gc.enable()
    await core.close()


async def test_the_record_of_a_value_is_available_after_its_session_has_ended() -> None:
    """A reader may already have the value and wait for the journal."""
    world = World()
    await world.join()
    program = world.program()
    output = program.call()
    await program.read(output)
    session = world.core.sessions.find(program.scope["session_id"])
    assert session is not None
    variable = session.graph.variable(output)
    before = value_view(variable)
    assert before.usage is not None
    program.end()
    await world.settle()
    assert not session.graph.variables
    assert variable.producer is None
    assert value_view(variable) == before
    await world.core.close()
