"""When requests come."""

import random


def poisson(rng: random.Random, rate: float, count: int) -> list[float]:
    """The first `count` arrivals, in seconds, of a stream with `rate` arrivals a second."""
    now, times = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def poisson_for(rng: random.Random, rate: float, seconds: float) -> list[float]:
    """All arrivals before `seconds`."""
    times: list[float] = []
    now = rng.expovariate(rate) if rate > 0 else seconds
    while now < seconds:
        times.append(now)
        now += rng.expovariate(rate)
    return times
