"""Calls go to engines with the features that they need. Else the error names the feature."""

from parrot.protocol.engine_api import Capabilities
from parrot.protocol.errors import ParrotError, UnsupportedField
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.graph.nodes import CallOptions, Completion, CompletionState
from tests.serve.execution.world import World
from tests.support.fake_engine import FakeEngine, fake_engine

PLAIN = frozenset({"max_gen_length", "temperature"})


def engine(name: str, *features: str, model: str = "m", max_seq_len: int = 50_000) -> FakeEngine:
    record = Capabilities(features=PLAIN.union(features))
    return fake_engine(name, model=model, capabilities=record, max_seq_len=max_seq_len)


async def run(world: World, *models: str, **sampling: object) -> Completion:
    config = SamplingConfig.model_validate({"max_gen_length": 20} | sampling)
    options = CallOptions(func_name="f", tenant="acme", models=models)
    completion = world.submit("x", options=options, sampling=config)
    await world.settle()
    world.dispatcher.check_integrity()
    return completion


def error_of(completion: Completion) -> ParrotError:
    error = completion.output.error
    assert isinstance(error, ParrotError), completion
    return error


async def test_a_call_goes_to_an_engine_with_its_features(world: World) -> None:
    able, other = engine("able", "regex", max_seq_len=100), engine("other", "top_k")
    await world.join(other)
    await world.join(able)
    for length in (20, 90):  # The longer output is cut: no capable engine is larger.
        done = await run(world, "m", regex="a", max_gen_length=length)
        assert done.state is CompletionState.DONE
    assert [len(e.requests) for e in (able, other)] == [2, 0]
    await run(world, "m", top_k=3)
    await run(world, top_k=4)
    assert [len(e.requests) for e in (able, other)] == [2, 2]


async def test_a_call_without_a_capable_engine_is_rejected_by_feature(world: World) -> None:
    await world.join(engine("a", "regex", "top_k"))
    await world.join(engine("b", "grammar"))
    await world.join(engine("c", "choices", model="n"))
    for models in (["m"], []):
        error = error_of(await run(world, *models, regex="a", min_p=0.5))
        assert isinstance(error, UnsupportedField)
        assert (error.status, error.param) == (400, "min_p")
    assert "no engine of m supports `choices`" in str(
        error_of(await run(world, "m", choices=["a"]))
    )
    both = await run(world, "m", "n", choices=["a"])
    assert both.state is CompletionState.DONE


async def test_an_engine_without_reported_features_may_get_the_call(world: World) -> None:
    await world.join(engine("a"))
    unknown = fake_engine("b", model="m")
    engine_id = await world.join(unknown)
    assert (await run(world, "m", regex="a")).state is CompletionState.DONE
    assert len(unknown.requests) == 1
    for features in (PLAIN, PLAIN | {"regex"}):
        world.heartbeat(engine_id, capabilities=Capabilities(features=features))
        done = await run(world, "m", regex=f"a{len(features)}")
        assert (done.state is CompletionState.DONE) == ("regex" in features)
    (_, view) = world.dispatcher.fleet.views()
    assert view.info.capabilities.features == PLAIN | {"regex"}


async def test_without_any_engine_a_call_waits(world: World) -> None:
    waiting = await run(world, "m", regex="a")
    assert waiting.state is CompletionState.QUEUED
    await world.join(engine("a", "regex"))
    await world.settle()
    assert waiting.state is CompletionState.DONE


async def test_a_call_whose_only_capable_engine_was_lost_runs_on_another(world: World) -> None:
    """The call does not wait. The other engine gets it, and may reject it."""
    await world.join(other := engine("other"))
    able_id = await world.join(able := engine("able", "regex"))
    able.script.hang_after = 0
    hanging = await run(world, "m", regex="a")
    assert len(able.requests) == 1
    world.lose(able_id)
    await world.settle()
    assert hanging.state is CompletionState.DONE
    assert len(other.requests) == 1
