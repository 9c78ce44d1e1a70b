"""Returned engines still cache their prefixes, and calls are placed there."""

import pytest

from parrot.serve.graph.nodes import Completion, CompletionState
from parrot.simulation import SimCluster, run_virtual
from tests.serve.execution.test_runs_simulated import DOCUMENT, User
from tests.serve.execution.world import World
from tests.support.fake_engine import Script, fake_engine


def ran_before(world: World, text: str, engine_name: str) -> Completion:
    """A call that was placed on this engine before ServeCore's restart."""
    completion = world.completion(text)
    completion.stats.attempts, completion.stats.engine_name = 1, engine_name
    world.dispatcher.submit(completion)
    return completion


def placed(*completions: Completion) -> list[str | None]:
    return [
        c.stats.engine_name if c.state is CompletionState.RUNNING else None for c in completions
    ]


async def test_calls_wait_for_the_engines_that_they_ran_on(world: World) -> None:
    texts = [letter * 400 for letter in "abc"]
    calls = [ran_before(world, t, n) for t, n in zip(texts, ("one", "two", "two"), strict=True)]
    engines = [fake_engine(name, script=Script(hang_after=0)) for name in ("two", "one")]
    await world.join(engines[0])
    await world.settle()
    assert placed(*calls) == [None] * 3
    await world.join(engines[1])
    await world.settle()
    assert placed(*calls) == ["one", "two", "two"]
    late = ran_before(world, "d" * 400, "three")  # It is restored later.
    await world.settle()
    assert placed(late) == [None]
    for engine in engines:
        engine.resume.set()
    await world.clock.advance(3.0)
    await late.output.wait()


async def test_a_call_goes_to_the_engine_of_the_call_that_it_continues(world: World) -> None:
    """It is an agent's next turn, submitted after the restart."""
    engines = [fake_engine(name) for name in ("one", "two")]
    world.dispatcher.restored()
    await world.clock.advance(5.0)
    for engine in engines:
        await world.join(engine)
    for name in ("one", "two"):
        before = world.completion(name * 400)
        before.stats.engine_name, before.times.started = name, 0.0
        before.output.producer = before
        before.state = CompletionState.DONE
        before.output.set("and this is what it answered")
        after = world.completion(name * 400)
        after.inputs = (before.output,)
        world.dispatcher.submit(after)
        key = world.dispatcher._ledger.prefixes.prompt(after)[1][-1]
        number = ("one", "two").index(name)
        assert world.dispatcher._ledger.index.likely_holders(key) == {number}
        assert await after.output.wait()
        assert after.stats.engine_name == name
    ours = world.completion("three" * 400)  # It continues a call after the restart.
    ours.inputs = (after.output,)
    after.output.producer = after
    world.dispatcher.submit(ours)
    key = world.dispatcher._ledger.prefixes.prompt(ours)[1][-1]
    assert world.dispatcher._ledger.index.likely_holders(key) is None
    assert await ours.output.wait()


async def test_calls_wait_at_most_three_seconds(world: World) -> None:
    lost = ran_before(world, "a" * 400, "gone")
    await world.clock.advance(20.0)
    await world.join(fake_engine("one"))
    await world.settle()
    assert placed(lost) == [None]
    await world.clock.advance(3.0)
    assert await lost.output.wait()
    again = ran_before(world, "b" * 400, "gone")
    assert await again.output.wait()


async def test_calls_without_an_earlier_engine_do_not_wait(world: World) -> None:
    fresh = world.submit("a")
    await world.join(fake_engine("one"))
    assert await fresh.output.wait()


@pytest.mark.parametrize("is_same", [True, False])
async def test_the_prefixes_of_a_returned_engine_count_as_cached(
    world: World, is_same: bool
) -> None:
    engines = [fake_engine(name) for name in ("one", "two")]
    for engine in engines:
        await world.join(engine)
    first = world.submit("s" * 400)
    await first.output.wait()
    (name,) = {first.stats.engine_name}
    index = ("one", "two").index(name or "")
    world.lose(index)
    back = engines[index] if is_same else fake_engine(name or "")
    await world.join(back)
    key = world.dispatcher._ledger.prefixes.prompt(first)[1][-1]
    likely = world.dispatcher._ledger.index.likely_holders(key)
    assert world.dispatcher._ledger.index.holders(key) is None
    assert likely == ({2} if is_same else None)
    again = world.submit("s" * 400, session=2)
    await again.output.wait()
    if is_same:
        assert again.stats.engine_name == name
        assert list(world.dispatcher._ledger.index.likely_holders(key) or ()) == [2]
        assert not len(world.dispatcher._ledger.index._cached)


def test_a_silent_engine_that_returns_has_its_prefix_cache() -> None:
    """The lost engine's process lives on. Only calls of the same tenant find its cache."""

    async def main() -> None:
        async with SimCluster(2) as cluster:
            user = await User.of(cluster)
            await user.reading(await user.ask("first", 5))
            (call,) = (await user.client.session_info(**user.scope)).calls
            assert call.engine is not None
            there = cluster.engines[call.engine]
            for _ in range(100):
                engine = cluster.core.fleet.engines.get(there.engine_id)
                assert engine is not None
                cluster.core.fleet.lose(engine, "a test")
                await there.come_back(cluster.core)
            await user.reading(await user.ask("first and more", 5))
            _, again = (await user.client.session_info(**user.scope)).calls
            assert again.engine == call.engine
            assert again.cached_tokens > len(DOCUMENT) > again.computed_tokens
            assert again.recomputed_tokens <= again.computed_tokens
            stranger = await User.of(cluster, api_key="another")
            await stranger.reading(await stranger.ask("first and more", 5))
            (foreign,) = (await stranger.client.session_info(**stranger.scope)).calls
            assert foreign.cached_tokens == 0
            cluster.check_integrity()

    run_virtual(main())


async def test_only_the_last_id_of_a_returning_engine_is_remembered(world: World) -> None:
    """Otherwise placements would check the engine's old ids instead of live engines."""
    engine = fake_engine("one")
    await world.join(engine)
    call = world.submit("s" * 400)
    await call.output.wait()
    key = world.dispatcher._ledger.prefixes.prompt(call)[1][-1]
    for number in range(1, 4):
        world.lose(number - 1)
        await world.join(engine)
        assert world.dispatcher._ledger.index.likely_holders(key) == {number}
