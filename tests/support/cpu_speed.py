"""The current speed of this machine, for limits on CPU time."""

import time

_ROUNDS = 100_000
_REFERENCE_S = 0.006  # The CPU time of `_measure` on the machine for which the limits were set.


def is_within(cpu_s: float, limit_s: float) -> bool:
    """Whether work that took `cpu_s` would take less than `limit_s` on the reference machine. The
    speed is measured only if `cpu_s` exceeds the limit."""
    return cpu_s < limit_s or cpu_s < limit_s * slowness()


def slowness() -> float:
    """The CPU time of a loop in Python, as a multiple of the reference machine's time, and at least
    1. A busy machine is slower, because its cores share caches and execution units."""
    fastest_s = min(_measure() for _ in range(3))
    return max(1.0, fastest_s / _REFERENCE_S)


def _measure() -> float:
    began, total = time.thread_time(), 0
    for number in range(_ROUNDS):
        total += number * number % 7
    assert total > 0
    return time.thread_time() - began
