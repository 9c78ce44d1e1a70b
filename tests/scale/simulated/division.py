"""Divide sessions among many ServeCores by several rules."""

import heapq
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from parrot.gateway.shards import ShardLoad, homes
from tests.scale.simulated.traffic import App, Kind, Start

_LIFE_S = {Kind.CHAT: 85.0, Kind.MAP: 1.3, Kind.COPILOT: 2.3}
"""Mean seconds of a session. Agents have no entry: their seats are always taken."""
_AT_WORK = {Kind.AGENT: 0.02, Kind.CHAT: 0.04, Kind.MAP: 8.0, Kind.COPILOT: 1.0}
"""Mean number of calls of a session that run at the same time."""
CALLS = {Kind.AGENT: 1 / 32, Kind.CHAT: 5.0, Kind.MAP: 11.0, Kind.COPILOT: 1.0}
"""Calls per session; for agents, calls per second of a working agent."""
_KV = {Kind.AGENT: 19_000, Kind.CHAT: 900, Kind.MAP: 4_000, Kind.COPILOT: 1_700}
"""Mean number of KV tokens of a session."""


class Rule(StrEnum):
    """How sessions are divided among shards. A client sends its request to a random shard."""

    SESSION = "by session"  # the shard that received the request
    HOME = "by application"  # the first home of the application, regardless of load
    COUNTS = "without KV"  # the first home that is not much fuller than the receiving shard
    SHARDS = "as shards do"  # like `COUNTS`, and KV counts as load


class Balance(NamedTuple):
    """The greatest and least load of a shard over the mean, in calls and in agents (which hold most
    of the KV)."""

    most_calls: float
    least_calls: float
    most_kv: float
    least_kv: float
    spilt: float  # share of the sessions that are not at the first home of their application
    homes: float  # number of shards that an application uses, mean over the sessions


Divided = Mapping[int, list[Start]]
"""The sessions of each shard."""


def divide(
    sessions: Iterable[Start], shards: Sequence[int], rule: Rule, seed: int, kv_tokens: int
) -> Divided:
    """Return the sessions of each shard, in order of time."""
    found: dict[int, list[Start]] = {number: [] for number in shards}
    for shard, session in placed(sessions, shards, rule, seed, kv_tokens):
        found[shard].append(session)
    return found


def placed(
    sessions: Iterable[Start], shards: Sequence[int], rule: Rule, seed: int, kv_tokens: int
) -> Iterator[tuple[int, Start]]:
    """Yield each session with its shard. Sessions must be sorted by time; each shard has memory for
    `kv_tokens` tokens."""
    loads = {shard: _Loaded(kv_tokens if rule is Rule.SHARDS else math.inf) for shard in shards}
    ends: list[tuple[float, int, Kind]] = []
    draw, homes = random.Random(f"division {seed}"), _Homes(shards)
    for session in sessions:
        while ends and ends[0][0] <= session.at:
            _, shard, kind = heapq.heappop(ends)
            loads[shard].add(kind, -1)
        chosen, kind = draw.choice(shards), session.app.kind
        if rule is Rule.HOME:
            chosen = homes.of(session.app)[0]
        elif rule is not Rule.SESSION:
            asked = loads[chosen].seen
            mine = (
                n
                for n in homes.of(session.app)
                if n == chosen or not loads[n].seen.declines_for(asked)
            )
            chosen = next(mine, chosen)
        loads[chosen].add(kind, 1)
        end = session.until
        if life_s := _LIFE_S.get(kind):
            end = session.at + draw.expovariate(1 / life_s)
        if end < math.inf:
            heapq.heappush(ends, (end, chosen, kind))
        yield chosen, session


@dataclass(slots=True)
class _Loaded:
    """The current load of a shard."""

    kv_tokens: float
    sessions: int = 0
    calls: float = 0.0
    kv: int = 0

    def add(self, kind: Kind, count: int) -> None:
        self.sessions += count
        self.calls += count * _AT_WORK[kind]
        self.kv += count * _KV[kind]

    @property
    def seen(self) -> ShardLoad:
        # `kv` is a sum of means and can exceed the memory of the shard.
        percentage = min(100, round(100 * self.kv / self.kv_tokens))
        return ShardLoad(self.sessions, round(self.calls), percentage)


def balance(divided: Divided, duration_s: float) -> Balance:
    calls = [sum(_calls(s, duration_s) for s in own) for own in divided.values()]
    agents = [sum(s.app.kind is Kind.AGENT for s in own) for own in divided.values()]
    homes, num = _Homes(list(divided)), sum(map(len, divided.values()))
    spilt = sum(homes.of(s.app)[0] != number for number, own in divided.items() for s in own)
    places: dict[App, set[int]] = {}
    for number, own in divided.items():
        for session in own:
            places.setdefault(session.app, set()).add(number)
    spread = sum(len(places[s.app]) for own in divided.values() for s in own)
    mean_calls, mean_agents = sum(calls) / len(calls), sum(agents) / len(agents)
    return Balance(
        max(calls) / mean_calls,
        min(calls) / mean_calls,
        max(agents) / mean_agents,
        min(agents) / mean_agents,
        spilt / num,
        spread / num,
    )


def _calls(session: Start, duration_s: float) -> float:
    kind = session.app.kind
    return CALLS[kind] * (duration_s if kind is Kind.AGENT else 1.0)


class _Homes:
    def __init__(self, shards: Sequence[int]) -> None:
        self._shards = shards
        self._urls = [f"http://10.0.0.{number}:9000" for number in shards]
        self._found: dict[App, list[int]] = {}

    def of(self, app: App) -> list[int]:
        if app not in self._found:
            found = homes(app.tenant, app.name, self._urls)
            self._found[app] = [self._shards[place] for place in found]
        return self._found[app]
