"""Agents whose tools run in the program, with engines in separate processes."""

import asyncio

import pytest

from parrot import P
from parrot.cluster import Cluster

pytestmark = pytest.mark.slow

ASKED: list[tuple[str, int]] = []


@P.tool
def weather(city: str, days: int) -> str:
    """The weather of a city.

    Args:
        city: its name.
        days: how many days ahead.
    """
    ASKED.append((city, days))
    return "It rains."


def check_reuse(vm: P.VirtualMachine) -> None:
    """Check that each turn continues the context of the previous turn."""
    first, *others = vm.session_info().calls
    assert others
    for call in others:
        assert call.cached_tokens >= first.computed_tokens + first.cached_tokens


@pytest.mark.timeout(300)
def test_the_embedded_model_calls_a_tool_and_answers(embedded_cluster: Cluster) -> None:
    """The grammar makes the call valid, although the model is too small to choose a tool well."""
    ASKED.clear()
    sampling = P.SamplingConfig(temperature=0, max_gen_length=48)
    agent = P.Agent([weather], must_call=True, max_turns=6, sampling_config=sampling)
    vm = P.VirtualMachine(embedded_cluster.core_url)
    with vm.running_scope():
        run = agent.stream("What is the weather in Paris tomorrow? City: Paris. Days: 1.")
        try:
            said = "".join(run)
        except P.MaxTurnsExceeded:
            assert run.num_turns == 6
        else:
            assert said.endswith(run.text)
        check_reuse(vm)
    assert run.calls
    succeeded = [call for call in run.calls if call.error is None]
    assert [tuple(call.arguments.values()) for call in succeeded] == ASKED
    assert {call.result for call in succeeded} <= {"It rains."}


async def test_agents_on_simulated_engines(sim_cluster: Cluster) -> None:
    """Simulated engines return random letters, which count as an answer. They have no grammars."""
    sampling = P.SamplingConfig(max_gen_length=6)
    vm = P.VirtualMachine(sim_cluster.core_url)
    with vm.running_scope(), pytest.raises(P.errors.UnsupportedField, match="grammar"):
        await P.Agent([weather], sampling_config=sampling).arun("x")
    agent = P.Agent([weather], "Be brief.", sampling_config=sampling, enforce_calls=False)
    with vm.running_scope():
        runs = await asyncio.gather(*(agent.arun(str(number)) for number in range(3)))
        assert all(run.text and not run.calls for run in runs)
        again = await agent.arun("again", after=runs[0])
        assert again.text
        *_, first, last = vm.session_info().calls[1:]
        assert last.cached_tokens > first.output_tokens
