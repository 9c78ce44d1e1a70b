"""How fast this machine computes now, for limits on CPU time."""

import time

_ROUNDS = 100_000
_REFERENCE_S = 0.006  # CPU time of the rounds on the machine for which the limits were set.


def is_within(cpu_s: float, limit_s: float) -> bool:
    """Whether what took `cpu_s` would have taken less than `limit_s` on the reference machine. Not
    measured if it has."""
    return cpu_s < limit_s or cpu_s < limit_s * slowness()


def slowness() -> float:
    """CPU time of some Python code, as a multiple of the reference machine's; at least 1. A busy
    machine is slower, since its cores share caches and execution units."""
    fastest_s = min(_measure() for _ in range(3))
    return max(1.0, fastest_s / _REFERENCE_S)


def _measure() -> float:
    began, total = time.thread_time(), 0
    for number in range(_ROUNDS):
        total += number * number % 7
    assert total > 0
    return time.thread_time() - began
