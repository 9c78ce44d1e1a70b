"""The number of engines of a pool as a function of its load."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.launch.on_ray.pools import Autoscaler, PoolLoad, Scaling, engines_to_remove, pool_load
from parrot.protocol.public import EngineStatus
from parrot.utils.config import ConfigError, parse_config

TICK_S = 5.0
IDLE = PoolLoad(1, 0, 0.0)


def scaler(**keys: float) -> Autoscaler:
    return Autoscaler(parse_config(Scaling, {"max_engines": 8, **keys}, "ray"))


def follow(
    autoscaler: Autoscaler, seconds: float, load_of: Callable[[int], PoolLoad], start: float = 0.0
) -> list[int]:
    """Return the target numbers of engines over time, under a load that depends on the number of
    engines. Engines start instantly."""
    return [
        autoscaler.observe(start + tick * TICK_S, load_of(autoscaler.wanted))
        for tick in range(int(seconds / TICK_S))
    ]


def demand(calls: float, slots: float = 10.0) -> Callable[[int], PoolLoad]:
    """Return a load with a fixed number of calls. Each engine runs `slots` calls; the others
    wait."""
    return lambda n: PoolLoad(n, max(0.0, calls - n * slots), min(1.0, calls / (n * slots)))


def test_a_queue_adds_engines() -> None:
    autoscaler = scaler(queue_per_engine=10)
    wanted = follow(autoscaler, 300, demand(60))
    assert wanted[:6] == [1] * 6  # 30 s, one window
    assert sorted(wanted) == wanted
    assert wanted[-1] == 7  # with 6 engines, all slots would be in use


def test_full_kv_adds_one_engine_at_a_time() -> None:
    wanted = follow(scaler(), 100, lambda n: PoolLoad(n, 0, 0.95 if n < 3 else 0.6))
    assert sorted(set(wanted)) == [1, 2, 3]


def test_no_engine_is_added_while_another_starts() -> None:
    autoscaler = scaler()
    assert follow(autoscaler, 40, lambda n: PoolLoad(1, 8, 1.0))[-1] == 2
    assert set(follow(autoscaler, 1000, lambda n: PoolLoad(1, 100, 1.0), 40)) == {2}


def test_an_engine_that_never_serves_is_removed_when_nothing_waits() -> None:
    autoscaler = scaler()
    autoscaler.adopt(2)
    assert follow(autoscaler, 310, lambda n: IDLE)[-1] == 1


def test_engines_are_removed_one_by_one_after_a_quiet_period() -> None:
    autoscaler = scaler()
    autoscaler.adopt(3)
    wanted = follow(autoscaler, 1000, lambda n: PoolLoad(n, 0, 0.1))
    assert wanted.index(2) == 60
    assert wanted.index(1) == 121


def test_an_engine_that_is_needed_stays() -> None:
    autoscaler = scaler()
    autoscaler.adopt(2)
    # One engine would have a utilization of 0.6.
    assert set(follow(autoscaler, 1000, lambda n: PoolLoad(2, 0, 0.3))) == {2}
    autoscaler.observe(1000, None)
    busy = [PoolLoad(2, 0, 0.0)] * 20 + [PoolLoad(2, 1, 0.0)]  # sometimes a call waits
    assert {autoscaler.observe(2000 + 5.0 * t, busy[t % 21]) for t in range(400)} == {2}


def test_missing_observations_restart_the_window() -> None:
    autoscaler = scaler()
    loads = [PoolLoad(1, 50, 1.0)] * 6 + [None]
    assert {autoscaler.observe(5.0 * t, loads[t % 7]) for t in range(100)} == {1}
    # These observations are too far apart.
    assert {autoscaler.observe(1000.0 + 31 * t, loads[0]) for t in range(100)} == {1}


def test_a_pool_of_a_fixed_size() -> None:
    autoscaler = Autoscaler(Scaling(min_engines=3))
    assert set(follow(autoscaler, 1000, demand(1e6))) == {3}
    assert set(follow(autoscaler, 1000, demand(0), 1000)) == {3}


@st.composite
def scalings(draw: st.DrawFn) -> Scaling:
    least = draw(st.integers(1, 4))
    low = draw(st.floats(0, 0.9))
    return Scaling(
        min_engines=least,
        max_engines=draw(st.integers(least, 12)),
        queue_per_engine=draw(st.floats(0.5, 20)),
        low_use=low,
        high_use=draw(st.floats(low, 1, exclude_min=True)),
        window=draw(st.floats(10, 60)),
        idle_window=draw(st.floats(10, 100)),
    )


loads = st.none() | st.builds(PoolLoad, st.integers(0, 12), st.floats(0, 1e4), st.floats(0, 2))


@settings(deadline=None)
@given(scalings(), st.lists(st.tuples(st.floats(0, 60), loads), max_size=200))
def test_bounds_and_pauses(config: Scaling, observed: list[tuple[float, PoolLoad | None]]) -> None:
    """The number stays within its bounds. A change at most doubles it or removes one engine, and at
    least one window passes between two changes."""
    autoscaler, now = Autoscaler(config), 0.0
    changed_at: float | None = None
    for pause, load in observed:
        now += pause
        before, after = autoscaler.wanted, autoscaler.observe(now, load)
        assert config.min_engines <= after <= config.most
        assert before - 1 <= after <= 2 * before
        if after == before:
            continue
        assert load is not None
        window = config.window if after > before else config.idle_window
        if changed_at is not None:
            assert now - changed_at >= window
        if after < before:
            assert not load.num_queued
        changed_at = now


@settings(max_examples=40, deadline=None)
@given(scalings(), st.floats(0, 200), st.integers(1, 12), st.booleans())
def test_no_flapping_under_a_constant_demand(
    config: Scaling, calls: float, begin: int, by_kv: bool
) -> None:
    """The number increases, perhaps too far because it doubles, then decreases and stays constant.
    It never increases again."""
    autoscaler = Autoscaler(config)
    autoscaler.adopt(begin)
    load_of = demand(calls)
    if by_kv:
        load_of = lambda n: PoolLoad(n, 0, calls / (n * 10))  # noqa: E731
    wanted = follow(autoscaler, 15 * (config.idle_window + config.window), load_of)
    top = wanted.index(max(wanted))
    assert wanted[:top] == sorted(wanted[:top])
    assert wanted[top:] == sorted(wanted[top:], reverse=True)


def status(name: str, num_running: int = 0, **fields: int) -> EngineStatus:
    return EngineStatus(
        engine_id=0,
        engine_name=name,
        engine_type="sim",
        model="m",
        host="h",
        port=1,
        num_running=num_running,
        tasks_capacity=fields.pop("tasks_capacity", 10),
        **fields,
    )


def test_a_load_covers_all_engines_of_the_pool() -> None:
    full = status("a", 8, needed_tokens=100, tokens_capacity=1000, num_queued=3)
    empty = status("b", 0, needed_tokens=900, tokens_capacity=1000, num_queued=3)
    assert pool_load([full, empty]) == PoolLoad(2, 3, 0.5)
    assert pool_load([full]) == PoolLoad(1, 3, 0.8)
    assert pool_load([]) == PoolLoad(0, 0, 0.0)
    assert pool_load([status("c", tasks_capacity=0)]).use == 0.0


def test_the_least_busy_engines_are_removed() -> None:
    names = ["a", "b", "c", "d"]
    serving = {"a": status("a", 0), "b": status("b", 0), "d": status("d", 5)}
    assert engines_to_remove(names, serving, 4) == []
    assert engines_to_remove(names, serving, 3) == ["c"]  # Does not serve.
    assert engines_to_remove(names, serving, 1) == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"min_engines": 0}, "greater than or equal to 1"),
        ({"min_engines": 3, "max_engines": 2}, "no less than `min_engines`"),
        ({"low_use": 0.9}, "less than `high_use`"),
        ({"min_engine": 3}, "Did you mean `min_engines`"),
    ],
)
def test_invalid_settings(keys: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_config(Scaling, keys, "ray")
