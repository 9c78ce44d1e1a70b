"""A day of mixed traffic: who asks for what, and when."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

_PEAK_H, _TROUGH_SHARE = 15.0, 0.35  # of the load at the peak
_APPS_OF_TENANT = (1, 4)
_TENANT_EXPONENT = 1.0  # the weight of the n-th largest tenant is 1/n to this power


class Kind(StrEnum):
    """What an application's sessions are."""

    AGENT = "agent"  # a recorded coding agent
    CHAT = "chat"  # a few questions of a person, each after reading the answer
    MAP = "map-reduce"  # a document's parts in parallel, then all their outputs
    COPILOT = "copilot"  # a call with a long shared beginning


RATES: Mapping[Kind, float] = {Kind.CHAT: 0.06, Kind.MAP: 0.02, Kind.COPILOT: 0.15}
"""Sessions that begin in a second at the peak, for each engine."""
SEATS = 9.0
"""Agents at work at the peak, for each engine: somewhat more than its KV holds."""

CALLS_PER_S: Mapping[Kind, float] = {
    Kind.AGENT: SEATS / 32.0,  # seconds of a turn, and before it
    Kind.CHAT: 5 * RATES[Kind.CHAT],
    Kind.MAP: 11 * RATES[Kind.MAP],
    Kind.COPILOT: RATES[Kind.COPILOT],
}
"""Of each engine at the peak."""


@dataclass(frozen=True, slots=True)
class App:
    """An application of a tenant. Its sessions share the first `shared` tokens of their prompts.
    `weight`: its part of all sessions of its kind."""

    tenant: str
    name: str
    kind: Kind
    shared: int
    weight: float


@dataclass(frozen=True, slots=True)
class Start:
    """A session begins `at` seconds. `is_old`: an agent's is in its middle."""

    at: float
    app: App
    seed: str
    is_old: bool = False


def load_at(hour: float) -> float:
    """The load over that of the peak, which is in the afternoon."""
    middle, swing = (1.0 + _TROUGH_SHARE) / 2, (1.0 - _TROUGH_SHARE) / 2
    return middle + swing * math.cos((hour - _PEAK_H) / 24 * 2 * math.pi)


_SHARED = {Kind.AGENT: 4250, Kind.CHAT: 500, Kind.MAP: 1000, Kind.COPILOT: 5107}


def applications(num_tenants: int, seed: int, hot_share: float = 0.0) -> list[App]:
    """The applications of all tenants; the first one has one of each kind. `hot_share`: its part of
    all traffic; 0: what its place makes it."""
    draw = random.Random(f"applications {seed}")
    found: list[App] = []
    for number in range(num_tenants):
        own = 1.0 / (number + 1) ** _TENANT_EXPONENT
        kinds = [draw.choice(list(Kind)) for _ in range(draw.randint(*_APPS_OF_TENANT))]
        if number == 0:
            kinds = list(Kind)
        for name, kind in enumerate(kinds):
            app = App(f"tenant{number}", f"app{name}", kind, _SHARED[kind], own / len(kinds))
            found.append(app)
    sums = dict.fromkeys(Kind, 0.0)
    firsts = {app.kind: app.weight for app in found[: len(Kind)]}
    for app in found:
        sums[app.kind] += app.weight
    for number, app in enumerate(found):
        part = app.weight / sums[app.kind]
        if hot_share and number < len(Kind):
            part = hot_share
        elif hot_share:
            part = (1.0 - hot_share) * app.weight / (sums[app.kind] - firsts[app.kind])
        found[number] = replace(app, weight=part)
    return found


Shares = Sequence[tuple[App, float]]
"""Applications, and the part of each one's sessions that is meant."""


def starts(
    shares: Shares, num_engines: float, load: float, duration_s: float, seed: str
) -> list[Start]:
    """The sessions that begin in a window at this load, of these shares of the traffic that goes to
    `num_engines` engines altogether, in order of time. Each seat of an agent is filled once more
    when it becomes free, so these are but the first ones."""
    found: list[Start] = []
    for kind in Kind:
        mine = [(app, app.weight * part) for app, part in shares if app.kind is kind]
        if not mine:
            continue
        apps = [app for app, _ in mine]
        weights = [weight for _, weight in mine]
        draw = random.Random(f"{seed} {kind}")
        if kind is Kind.AGENT:
            count = draw.random() + SEATS * num_engines * load * sum(weights)
            times: Iterator[float] = (10.0 * draw.random() for _ in range(int(count)))
        else:
            rate = RATES[kind] * num_engines * load * sum(weights)
            times = _poisson(draw, rate, duration_s)
        for number, at in enumerate(times):
            (app,) = draw.choices(apps, weights)
            found.append(Start(at, app, f"{seed} {kind} {number}", kind is Kind.AGENT))
    return sorted(found, key=lambda start: (start.at, start.seed))


def _poisson(draw: random.Random, rate: float, duration_s: float) -> Iterator[float]:
    at = draw.expovariate(rate)
    while at < duration_s:
        yield at
        at += draw.expovariate(rate)
