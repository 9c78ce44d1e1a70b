"""The costs of a sim engine's steps, and its sampled tokens."""

from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.engine.config import SimConfig, SimInstance, load_engine_config
from parrot.engine.core.steps import SampleSpec, SequenceStep, StepPlan, UniqueKv
from parrot.engine.sim import SimRunner
from parrot.protocol.sampling import ResolvedSampling
from tests.support.manual_clock import ManualClock

SIZE = 4
CONFIGS = sorted((Path(__file__).parents[3] / "sample_configs" / "engine").glob("sim_*.json"))
FREE = dict.fromkeys(("step_s", "sequence_s", "context_token_s", "prefill_token_s"), 0.0)


def step(context_id: int, blocks: list[int], end: int, num_tokens: int = 1) -> SequenceStep:
    return SequenceStep(context_id, array("i", [0] * num_tokens), end - num_tokens, blocks, None)


def positions(sequences: list[SequenceStep]) -> int:
    """The same count without increments."""
    return len(
        {
            (s.block_ids[position // SIZE], position % SIZE)
            for s in sequences
            for position in range(s.end)
        }
    )


def test_shared_kv_costs_once_or_once_per_context():
    plan = StepPlan((step(1, [5, 6, 7], 10), step(2, [5, 6, 8, 9], 13), step(3, [4], 2)))
    costs = FREE | {"context_token_s": 1.0, "block_size": SIZE}
    shared = SimRunner(SimInstance(**costs), ManualClock())
    assert shared.cost(plan) == positions(list(plan.sequences)) == 8 + 2 + 5 + 2
    assert shared.cost(plan) == 17
    alone = SimRunner(SimInstance(**costs, shared_prefix=False), ManualClock())
    assert alone.cost(plan) == 10 + 13 + 2


@given(st.data())
def test_incremental_counts_equal_full_counts(data):
    """Contexts arrive, grow, lose blocks, copy their last block, and end."""
    counter = UniqueKv(SIZE)
    tables: dict[int, list[int]] = {}
    fresh = iter(range(1000, 9000))
    for _ in range(data.draw(st.integers(1, 12))):
        for context_id in data.draw(st.sets(st.integers(0, 5))):
            table = tables.get(context_id)
            if table is None:
                parent = data.draw(st.sampled_from([[], *tables.values()]))
                keep = data.draw(st.integers(0, len(parent)))
                tables[context_id] = [*parent[:keep], next(fresh)]
            elif data.draw(st.booleans()):
                tables[context_id] = [*table, next(fresh)]
            elif data.draw(st.booleans()):
                tables[context_id] = [*table[:-1], next(fresh)]
            else:
                keep = data.draw(st.integers(0, len(table) - 1))
                tables[context_id] = [*table[:keep], next(fresh)]
        for context_id in data.draw(st.sets(st.integers(0, 5), max_size=2)):
            tables.pop(context_id, None)
        sequences = [
            step(context_id, list(table), len(table) * SIZE - data.draw(st.integers(0, SIZE - 1)))
            for context_id, table in tables.items()
        ]
        # Only the last block of a context may have unwritten positions, and only if no other
        # context has that block.
        sole = [s for s in sequences if sum(s.block_ids[-1] in t for t in tables.values()) == 1]
        full = [s._replace(start=len(s.block_ids) * SIZE - 1) for s in sequences if s not in sole]
        assert counter.count([*sole, *full]) == positions([*sole, *full])


def test_the_cost_of_a_long_prompt_grows_with_its_pairs_of_tokens():
    runner = SimRunner(SimInstance(**FREE, prefill_pair_s=1.0, block_size=SIZE), ManualClock())
    whole = runner.cost(StepPlan((step(1, list(range(25)), 100, 100),)))
    first = runner.cost(StepPlan((step(1, list(range(15)), 60, 60),)))
    rest = runner.cost(StepPlan((step(1, list(range(25)), 100, 40),)))
    assert whole == first + rest == 100 * 100 / 2
    assert runner.cost(StepPlan((step(1, list(range(26)), 101),))) == 0


def test_a_token_depends_only_on_the_whole_context():
    """The runner keeps sums from step to step. A new runner that starts in the middle gives the
    same tokens."""
    sampling = ResolvedSampling()

    def sample(runner: SimRunner, *contexts: tuple[int, bytes]) -> list[int]:
        specs = [
            SampleSpec(job_id, sampling, 0, 0, (), array("i", list(text)))
            for job_id, text in contexts
        ]
        steps = (SequenceStep(s.job_id, array("i", [1]), 0, [1], s) for s in specs)
        return list(runner.run(StepPlan(tuple(steps))).tokens.values())

    runner = SimRunner(SimInstance(), ManualClock())
    text = b"once upon a time"
    for end in range(1, len(text)):
        (token, other) = sample(runner, (1, text[:end]), (2, text[::-1][:end]))
        assert [token] == sample(SimRunner(SimInstance(), ManualClock()), (7, text[:end]))
        assert [other] == sample(SimRunner(SimInstance(), ManualClock()), (1, text[::-1][:end]))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_fitted_configs_are_valid_and_plausible(path: Path):
    config = load_engine_config(str(path))
    assert isinstance(config, SimConfig)
    costs = config.instance
    assert 0.5e-3 < costs.step_s < 0.02
    assert costs.context_token_s * 1000 < costs.step_s
    assert 10e3 < 1 / costs.prefill_token_s < 1e6
    assert costs.num_kv_cache_blocks * costs.block_size > 100_000
