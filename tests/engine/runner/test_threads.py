"""The policy adapts the number of threads to the machine. These tests run in virtual time."""

import random
from collections.abc import Callable
from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.engine.runner.cpu import ThreadPolicy

Machine = Callable[[int, int], float]
"""Seconds of a step by its rows and its threads."""


def idle(num_rows: int, threads: int) -> float:
    return (0.005 + 0.028 / threads ** (0.1 if num_rows < 8 else 0.9)) * (1 + num_rows / 24)


def noisy(machine: Machine, seed: int) -> Machine:
    numbers = random.Random(seed)
    return lambda num_rows, threads: machine(num_rows, threads) * numbers.uniform(0.92, 1.15)


def with_busy_core(cores: int, seed: int) -> Machine:
    """A machine on which another process uses one core. A step that needs all cores waits up to 160
    ms."""
    numbers = random.Random(seed)

    def seconds(num_rows: int, threads: int) -> float:
        waits = numbers.choice((0, 8, 16, 24, 40)) if threads == cores else 0
        return idle(num_rows, threads) + waits * 0.004

    return seconds


def run(policy: ThreadPolicy, machine: Machine, num_steps: int, num_rows: int = 1) -> float:
    total = 0.0
    for _ in range(num_steps):
        seconds = machine(num_rows, policy.choose(num_rows))
        policy.observe(num_rows, seconds)
        total += seconds
    return total


def best_fixed(machine: Callable[[int], Machine], cores: int, num_steps: int, rows: int) -> float:
    return min(
        sum(step(rows, threads) for step in [machine(threads)] for _ in range(num_steps))
        for threads in range(1, cores + 1)
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_rows", [1, 16, 500])
@pytest.mark.parametrize("cores", [1, 2, 4, 16])
def test_no_fixed_number_of_threads_is_10_percent_faster(
    cores: int, num_rows: int, seed: int
) -> None:
    machines: list[Callable[[int], Machine]] = [
        lambda extra: noisy(idle, seed + extra),
        lambda extra: noisy(with_busy_core(cores, seed + extra), seed),
    ]
    for machine in machines:
        taken = run(ThreadPolicy(cores), machine(100), 1000, num_rows)
        assert best_fixed(machine, cores, 1000, num_rows) > 0.9 * taken


def overloaded(seed: int) -> Machine:
    """Threads wait for their cores at random. With two threads or more, they also wait for each
    other."""
    numbers = random.Random(seed)

    def seconds(num_rows: int, threads: int) -> float:
        chances = 2 if threads == 1 else 12 * threads
        waits = sum(numbers.random() < 0.4 for _ in range(chances))
        return idle(num_rows, threads) + sum(numbers.expovariate(25.0) for _ in range(waits))

    return seconds


@pytest.mark.parametrize("seed", range(5))
def test_times_that_vary_tenfold(seed: int) -> None:
    taken = run(ThreadPolicy(2), overloaded(seed), 1000)
    assert best_fixed(lambda extra: overloaded(seed + extra), 2, 1000, 1) > 0.88 * taken


@pytest.mark.parametrize("seed", range(5))
def test_a_core_that_is_busy_from_time_to_time(seed: int) -> None:
    policy = ThreadPolicy(2)
    for machine in islice(cycle([noisy(idle, seed), with_busy_core(2, seed)]), 6):
        fixed = min(sum(machine(1, threads) for _ in range(500)) for threads in (1, 2))
        assert fixed > 0.88 * run(policy, machine, 500)


def test_a_busy_core_is_noticed_within_5_steps() -> None:
    used: list[int] = []

    def machine(num_rows: int, threads: int) -> float:
        used.append(threads)
        has_neighbour = 1000 <= len(used) < 2000
        return 0.1 if threads == 2 and has_neighbour else 0.03 / threads

    run(ThreadPolicy(2), machine, 3000)
    assert used[900:1000].count(2) > 90
    assert used[1005:1100].count(2) <= 4
    assert used[1900:2000].count(2) <= 4
    assert used[2200:2300].count(2) > 90


def test_small_and_large_steps_have_their_own_number_of_threads() -> None:
    def machine(num_rows: int, threads: int) -> float:
        return num_rows * 0.01 / threads if num_rows >= 64 else 0.03 * threads

    policy = ThreadPolicy(4)
    for _ in range(40):
        run(policy, machine, 4, 1)
        run(policy, machine, 1, 300)
    assert (policy.choose(1), policy.choose(300)) == (1, 4)


@given(st.integers(1, 300), st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 1e3))))
def test_the_number_of_threads_is_from_1_to_the_maximum(
    most: int, steps: list[tuple[int, float]]
) -> None:
    policy = ThreadPolicy(most)
    for num_rows, seconds in steps:
        assert 1 <= policy.choose(num_rows) <= most
        policy.observe(num_rows, seconds)
