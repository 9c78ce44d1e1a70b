"""How long messages are under way. A `Latency` gives the seconds of one round trip."""

import math
import random
from collections.abc import Callable, Sequence

Latency = Callable[[], float]

LAN_RTT_S = 0.3e-3
WAN_MEDIAN_RTT_S = 0.238
WAN_SPREAD = 0.076  # standard deviation of the logarithm, of clients far away


def fixed(rtt_s: float) -> Latency:
    return lambda: rtt_s


def lan() -> Latency:
    return fixed(LAN_RTT_S)


def wan(seed: int = 0) -> Latency:
    """Log-normal around a median of 238 ms, nine of ten between 210 and 270."""
    draw = random.Random(seed)
    median = math.log(WAN_MEDIAN_RTT_S)
    return lambda: draw.lognormvariate(median, WAN_SPREAD)


def sampled(rtts_s: Sequence[float], seed: int = 0) -> Latency:
    """One of the measured values each time."""
    draw = random.Random(seed)
    return lambda: draw.choice(rtts_s)
