"""Who of many ServeCores gets whose sessions."""

from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple

from benchmark.scale.simulated.traffic import CALLS_PER_S, App


class Rule(StrEnum):
    """What divides sessions among shards."""

    SESSION = "by session"  # each session by its own hash
    AFFINITY = "by application"  # by tenant and application: rendezvous hashing
    SPILL = "bounded"  # the same, but what is too much for a shard goes to the next choice


class Balance(NamedTuple):
    """Load of the busiest shard, of the one that 99 of 100 do not exceed, and of the idlest one,
    over the mean; `spilt`: part of the load that is not with its first choice, `homes`: shards that
    an application has, by the mean over the load."""

    most: float
    p99: float
    least: float
    spilt: float
    homes: float


def order(app: App, shards: Sequence[int]) -> list[int]:
    """The shards, the one first that the application had rather: rendezvous hashing, so that each
    that is missing is replaced for its own applications alone."""
    name = f"{app.tenant}/{app.name}".encode()
    return sorted(shards, key=lambda n: blake2b(b"%d " % n + name, digest_size=8).digest())


def load_of(app: App) -> float:
    """Calls of the application, of all calls."""
    return app.weight * CALLS_PER_S[app.kind] / sum(CALLS_PER_S.values())


def divide(
    apps: Sequence[App], shards: Sequence[int], rule: Rule, most: float = 1.25
) -> dict[int, list[tuple[App, float]]]:
    """Each shard's applications, and its part of each one's sessions. `most`: the load over the
    mean at which a shard's applications spill."""
    found: dict[int, list[tuple[App, float]]] = {number: [] for number in shards}
    if rule is Rule.SESSION:
        for own in found.values():
            own += [(app, 1.0 / len(shards)) for app in apps]
        return found
    bound = most / len(shards) if rule is Rule.SPILL else float("inf")
    loads = dict.fromkeys(shards, 0.0)
    for app in apps:
        left = load = load_of(app)
        for number in order(app, shards):
            part = min(left, bound - loads[number])
            if part <= 0.0:
                continue
            loads[number] += part
            found[number].append((app, part / load))
            left -= part
            if left <= 1e-12:
                break
    return found


def balance(apps: Sequence[App], divided: dict[int, list[tuple[App, float]]]) -> Balance:
    shards = list(divided)
    total = sum(map(load_of, apps))
    loads = sorted(sum(load_of(a) * part for a, part in own) for own in divided.values())
    mean = total / len(shards)
    first = {app: order(app, shards)[0] for app in apps}
    spilt = sum(load_of(a) * p for n, own in divided.items() for a, p in own if first[a] != n)
    num_homes: dict[App, int] = dict.fromkeys(apps, 0)
    for own in divided.values():
        for app, _ in own:
            num_homes[app] += 1
    homes = sum(load_of(app) * count for app, count in num_homes.items())
    return Balance(
        loads[-1] / mean,
        loads[int(0.99 * (len(loads) - 1))] / mean,
        loads[0] / mean,
        spilt / total,
        homes / total,
    )


def moved(
    before: dict[int, list[tuple[App, float]]], after: dict[int, list[tuple[App, float]]]
) -> float:
    """The part of all load that has another shard now."""
    kept = total = 0.0
    for number, own in before.items():
        now = dict(after.get(number, []))
        for app, part in own:
            total += load_of(app) * part
            kept += load_of(app) * min(part, now.get(app, 0.0))
    return 1.0 - kept / total
