"""Generate a day of mixed traffic: sessions of several kinds, with their applications and times."""

import heapq
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

_FIRST_S = 10.0  # Seconds at the beginning within which the first agents start.
_STEPS_OF_HOUR = 60
_APPS_OF_TENANT = (1, 4)
_TENANT_EXPONENT = 1.0  # the weight of the n-th largest tenant is 1/n to this power


class Kind(StrEnum):
    """The kind of an application's sessions."""

    AGENT = "agent"  # a recorded coding agent
    CHAT = "chat"  # 2 to 8 questions of a person, with pauses to read the answers
    MAP = "map-reduce"  # parts of a document in parallel, then a call on all their outputs
    COPILOT = "copilot"  # a call with a long shared prefix


RATES: Mapping[Kind, float] = {Kind.CHAT: 0.06, Kind.MAP: 0.02, Kind.COPILOT: 0.15}
"""Sessions that start per second and engine at the peak."""
SEATS = 9.0
"""Working agents per engine at the peak: slightly more than its KV cache holds."""

AGENT_S = 3000.0
"""Mean working time of an agent, in seconds."""

CALLS_PER_S: Mapping[Kind, float] = {
    Kind.AGENT: SEATS / 32.0,  # a turn and the pause before it take 32 s
    Kind.CHAT: 5 * RATES[Kind.CHAT],
    Kind.MAP: 11 * RATES[Kind.MAP],
    Kind.COPILOT: RATES[Kind.COPILOT],
}
"""Calls per second and engine at the peak."""


@dataclass(frozen=True, slots=True)
class App:
    """An application of a tenant. Its sessions share the first `shared` tokens of their prompts.
    `weight` is its share of all sessions of its kind."""

    tenant: str
    name: str
    kind: Kind
    shared: int
    weight: float


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a session or, for agents, of a seat, in which sessions follow each other."""

    at: float
    app: App
    seed: str
    is_old: bool = False  # the first session of a seat starts in the middle of its recording
    until: float = math.inf  # the end of a seat


Loads = Mapping[Kind, float]
"""The load of each kind, relative to 15:00."""
PEAK: Loads = dict.fromkeys(Kind, 1.0)

_CURVES: Mapping[Kind, Sequence[tuple[float, float]]] = {
    Kind.AGENT: ((0, 0.25), (4, 0.15), (7, 0.25), (10, 0.9), (12.5, 0.8), (15, 1.0), (18, 0.7),
                 (21, 0.45), (24, 0.25)),
    Kind.CHAT: ((0, 0.5), (4, 0.3), (7, 0.45), (10, 0.9), (12.5, 0.85), (15, 1.0), (20, 0.85),
                (24, 0.5)),
    Kind.MAP: ((0, 1.5), (5, 1.5), (8, 1.0), (20, 1.0), (23, 1.5), (24, 1.5)),
    Kind.COPILOT: ((0, 0.1), (4, 0.05), (7, 0.15), (10, 0.95), (12.5, 0.75), (15, 1.0),
                   (18, 0.6), (21, 0.2), (24, 0.1)),
}  # fmt: skip
"""Hours and loads. Loads between two hours are interpolated linearly."""


def load_at(kind: Kind, hour: float) -> float:
    """A working day's: people write code by day and chat into the evening, and documents are gone
    through by night. These curves are made up; no operator's figures are behind them."""
    hour %= 24
    for (before, low), (after, high) in pairwise(_CURVES[kind]):
        if hour <= after:
            return low + (high - low) * (hour - before) / (after - before)
    raise AssertionError(hour)


def loads_at(hour: float) -> Loads:
    return {kind: load_at(kind, hour) for kind in Kind}


_SHARED = {Kind.AGENT: 4250, Kind.CHAT: 500, Kind.MAP: 1000, Kind.COPILOT: 5107}


def applications(num_tenants: int, seed: int, hot_share: float = 0.0) -> list[App]:
    """Return the applications of all tenants. The first tenant has one of each kind. `hot_share` is
    its share of all traffic; 0 means the share that its rank gives it."""
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
"""Applications, each with the share of its sessions to generate."""


def starts(
    shares: Shares, num_engines: float, loads: Loads, duration_s: float, seed: str
) -> list[Start]:
    """Return the sessions that start in a window, in order of time. The cluster has `num_engines`
    engines. Each seat of an agent is included once: it runs its later sessions by itself."""
    found: list[Start] = []
    for kind in Kind:
        mine = _Weighted.of(kind, shares)
        draw = random.Random(f"{seed} {kind}")
        if kind is Kind.AGENT:
            count = draw.random() + SEATS * num_engines * loads[kind] * mine.total
            times: Iterator[float] = (_FIRST_S * draw.random() for _ in range(int(count)))
        else:
            rate = RATES[kind] * num_engines * loads[kind] * mine.total
            times = _poisson(draw, rate, duration_s)
        for number, at in enumerate(times):
            app = mine.draw(draw)
            found.append(Start(at, app, f"{seed} {kind} {number}", kind is Kind.AGENT))
    return sorted(found, key=lambda start: (start.at, start.seed))


class _Weighted(NamedTuple):
    """The applications of a kind, and the cumulative sums of their weights."""

    apps: Sequence[App]
    sums: Sequence[float]

    @classmethod
    def of(cls, kind: Kind, shares: Shares) -> Self:
        mine = [(app, app.weight * part) for app, part in shares if app.kind is kind]
        return cls([app for app, _ in mine], list(accumulate(weight for _, weight in mine)))

    @property
    def total(self) -> float:
        return self.sums[-1] if self.sums else 0.0

    def draw(self, draw: random.Random) -> App:
        (app,) = draw.choices(self.apps, cum_weights=self.sums)
        return app


def _poisson(draw: random.Random, rate: float, duration_s: float) -> Iterator[float]:
    at = 0.0
    while rate > 0.0 and (at := at + draw.expovariate(rate)) < duration_s:
        yield at


_Span = tuple[float, float]
"""Begin and end, in seconds."""


@dataclass(frozen=True, slots=True)
class Day:
    """A day from the hour `first` to the hour `last`, each of `hour_s` seconds. It begins one hour
    before the first. If `hour_s` is less than 3,600, an hour is sampled: sessions keep their real
    durations, but the load changes faster.

    Agents arrive and leave as the curve says. An arriving agent starts in the middle of a recorded
    session; an agent leaves between two turns. `agent_s` is the mean number of seconds until a seat
    passes to the next agent; infinity means that its first agent keeps it.

    An arriving agent computes a long prompt. If a sampled hour had as many arrivals as a full hour,
    these prompts would be most of its work. So unless `settle_s` is 0, agents arrive at the
    beginning of the hour, and the first `settle_s` seconds are not measured."""

    hour_s: float
    agent_s: float = math.inf
    first: int = 0
    last: int = 24
    settle_s: float = 0.0

    @property
    def num_hours(self) -> int:
        """The number of hours, including the one before the first."""
        return 1 + self.last - self.first

    @property
    def end_s(self) -> float:
        return self.num_hours * self.hour_s

    @property
    def marks(self) -> Sequence[float]:
        """For each measured hour, its beginning and the beginning of its measured part, in seconds;
        then the end of the last hour."""
        begins = [number * self.hour_s for number in range(1, self.num_hours)]
        return [mark for at in begins for mark in (at, at + self.settle_s)] + [self.end_s]

    def hour(self, at: float) -> float:
        return at / self.hour_s + self.first - 1.0

    def starts(self, shares: Shares, num_engines: float, seed: str) -> Iterator[Start]:
        """Yield the sessions of the whole day, in order of time. See the function `starts`."""
        streams = [self._starts(kind, shares, num_engines, seed) for kind in Kind]
        return heapq.merge(*streams, key=lambda start: start.at)

    def _starts(self, kind: Kind, shares: Shares, num_engines: float, seed: str) -> Iterator[Start]:
        mine, draw = _Weighted.of(kind, shares), random.Random(f"{seed} {kind} day")
        if kind is Kind.AGENT:
            spans = self._agents(draw, SEATS * num_engines * mine.total)
        else:
            spans = self._thinned(kind, draw, RATES[kind] * num_engines * mine.total)
        for number, (at, until) in enumerate(spans):
            app = mine.draw(draw)
            yield Start(at, app, f"{seed} {kind} {number}", kind is Kind.AGENT, until)

    def _thinned(self, kind: Kind, draw: random.Random, rate: float) -> Iterator[_Span]:
        most = max(load for _, load in _CURVES[kind])
        for at in _poisson(draw, rate * most, self.end_s):
            if draw.random() * most < load_at(kind, self.hour(at)):
                yield at, math.inf

    def _agents(self, draw: random.Random, num_seats: float) -> list[_Span]:
        num_steps = 1 if self.settle_s else _STEPS_OF_HOUR
        step_s, taken, seats = self.hour_s / num_steps, list[float](), list[_Span]()
        within_s = _FIRST_S if self.settle_s else step_s
        for number in range(self.num_hours * num_steps):
            now = number * step_s
            wanted = round(num_seats * load_at(Kind.AGENT, self.hour(now + step_s / 2)))
            while len(taken) > wanted:
                place = draw.randrange(len(taken))
                taken[place], taken[-1] = taken[-1], taken[place]
                seats.append((taken.pop(), now))
            while len(taken) < wanted:
                taken.append(now + draw.random() * (within_s if number else _FIRST_S))
        seats += [(at, math.inf) for at in taken]
        return sorted(span for seat in seats for span in self._sessions(draw, *seat))

    def _sessions(self, draw: random.Random, at: float, until: float) -> Iterator[_Span]:
        """Yield the sessions that follow each other in a seat, until the end of the day."""
        while at < min(until, self.end_s):
            begun, at = at, until
            if self.agent_s < math.inf:
                at = min(until, begun + draw.expovariate(1 / self.agent_s))
            yield begun, at
