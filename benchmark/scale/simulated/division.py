"""Who of many ServeCores gets whose sessions."""

from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple

from benchmark.scale.simulated.traffic import CALLS_PER_S, App, Kind


class Rule(StrEnum):
    """What divides sessions among shards."""

    SESSION = "by session"  # each session by its own hash
    AFFINITY = "by application"  # by tenant and application: rendezvous hashing
    BY_CALLS = "bounded by calls"  # so, but what is too much for a shard goes to the next choice
    BOUNDED = "bounded"  # the same, by calls and by KV


class Load(NamedTuple):
    """Calls, and KV that sessions go on from, which is agents': of an application or a shard, as a
    part of all."""

    calls: float
    kv: float

    def times(self, factor: float) -> "Load":
        return Load(self.calls * factor, self.kv * factor)

    def plus(self, other: "Load") -> "Load":
        return Load(self.calls + other.calls, self.kv + other.kv)


NOTHING = Load(0.0, 0.0)

Divided = dict[int, list[tuple[App, float]]]
"""By shard, its applications and its part of each one's sessions."""


class Balance(NamedTuple):
    """Calls of the busiest shard and of the idlest one, over the mean, and the most KV; `spilt`:
    part of the calls that are not with their application's first choice, `homes`: shards that an
    application has, by the mean over the calls."""

    most_calls: float
    least_calls: float
    most_kv: float
    spilt: float
    homes: float


def order(app: App, shards: Sequence[int]) -> list[int]:
    """The shards, the one first that the application had rather: rendezvous hashing, so that each
    that is missing is replaced for its own applications alone."""
    name = f"{app.tenant}/{app.name}".encode()
    return sorted(shards, key=lambda n: blake2b(b"%d " % n + name, digest_size=8).digest())


def load_of(app: App) -> Load:
    calls = app.weight * CALLS_PER_S[app.kind] / sum(CALLS_PER_S.values())
    return Load(calls, app.weight if app.kind is Kind.AGENT else 0.0)


def divide(apps: Sequence[App], shards: Sequence[int], rule: Rule, most: float = 1.25) -> Divided:
    """Each shard's applications, and its part of each one's sessions. `most`: the load over the
    mean at which a shard's applications spill."""
    found: Divided = {number: [] for number in shards}
    if rule is Rule.SESSION:
        for own in found.values():
            own += [(app, 1.0 / len(shards)) for app in apps]
        return found
    bound = most / len(shards)
    loads = dict.fromkeys(shards, NOTHING)
    for app in apps:
        left, load = 1.0, load_of(app)
        for number in order(app, shards):
            part = left
            if rule is not Rule.AFFINITY:
                part = min(part, (bound - loads[number].calls) / load.calls)
            if rule is Rule.BOUNDED and load.kv:
                part = min(part, (bound - loads[number].kv) / load.kv)
            if part <= 0.0:
                continue
            loads[number] = loads[number].plus(load.times(part))
            found[number].append((app, part))
            left -= part
            if left <= 1e-9:
                break
    return found


def balance(apps: Sequence[App], divided: Divided) -> Balance:
    loads = [_sum(own) for own in divided.values()]
    first = {app: order(app, list(divided))[0] for app in apps}
    spilt = [
        load_of(app).calls * part
        for number, own in divided.items()
        for app, part in own
        if first[app] != number
    ]
    homes = [load_of(app).calls for own in divided.values() for app, _ in own]
    return Balance(
        max(load.calls for load in loads) * len(divided),
        min(load.calls for load in loads) * len(divided),
        max(load.kv for load in loads) * len(divided),
        sum(spilt),
        sum(homes),
    )


def moved(before: Divided, after: Divided) -> float:
    """The part of all calls that has another shard now."""
    kept = 0.0
    for number, own in before.items():
        now = dict(after.get(number, []))
        kept += sum(load_of(app).calls * min(part, now.get(app, 0.0)) for app, part in own)
    return 1.0 - kept


def _sum(own: Sequence[tuple[App, float]]) -> Load:
    total = NOTHING
    for app, part in own:
        total = total.plus(load_of(app).times(part))
    return total
