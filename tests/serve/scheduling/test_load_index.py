"""The sums over all engines stay exact while engines are added and removed."""

import random

import pytest

from parrot.serve.scheduling.load import LoadIndex
from tests.serve.scheduling.scheduler_bench import Bench


def test_sums_equal_those_of_the_remaining_engines() -> None:
    rng, index, live = random.Random(0), LoadIndex(), list[int]()
    task = Bench().task()
    task.needs = frozenset({"regex"})
    kinds = [None, frozenset[str](), frozenset({"regex"}), frozenset({"regex", "n"})]
    for number in range(400):
        if live and rng.random() < 0.45:
            index.remove(live.pop(rng.randrange(len(live))))
        else:
            live.append(number)
            index.add(number, "model", 4, rng.choice([1000, 2000, 4000]))
        if live and rng.random() < 0.5:
            index.reported(rng.choice(live), features=rng.choice(kinds))
        loads = [load for load in index if load.id in live]
        unknown = [load for load in loads if load.features is None]
        able = [load for load in loads if load.features and task.needs <= load.features]
        longest = max((load.max_len for load in able or unknown or loads), default=0)
        assert [load for load in loads if index.accepts_longest(load, task)] == [
            load for load in loads if load.max_len >= longest
        ]
        steps = [load.step_s for load in loads]
        if steps:
            mean = sum(steps) / len(steps)
            assert index.pace(("model",)).step_s == pytest.approx(mean, rel=1e-9)
