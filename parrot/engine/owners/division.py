"""How an engine's capacity is divided among the ServeCores that share it.

A ServeCore has a *lease*: so many tokens of KV and calls at once. A lease grows when the engine
sends a larger one, but shrinks only when the ServeCore has answered that it has got the smaller one
and what it still uses. Until then the larger one counts, so whatever is lost on the way, and
whatever comes late, the leases are never more than the capacity in sum."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parrot.protocol.registration.payloads import Lease, LeaseUse

_FLOOR_PART = 8  # an equal part's part that a ServeCore has though it wants nothing


class Claim(NamedTuple):
    """The amount that one has use for, and the least with which its largest call can run."""

    wanted: int = 0
    least: int = 0


def divide(capacity: int, claims: Sequence[Claim], turn: int = 0) -> list[int]:
    """Fair parts of the capacity, which are all of it in sum, for one claim or more.

    Each has a floor, or its `least`; what is left of that is divided so that the smallest is as
    large as possible, up to what each wants (max-min); and what nobody wants, equally. If not all
    can have their `least` at once, one has it, whose `turn` it is, and the others divide the rest.
    """
    count = len(claims)
    floor = capacity // count // _FLOOR_PART
    parts = [max(floor, min(claim.least, capacity)) for claim in claims]
    if sum(parts) > capacity:
        own = min(claims[turn].least, capacity)
        others = [Claim(claim.wanted) for i, claim in enumerate(claims) if i != turn]
        parts = divide(capacity - own, others)
        return [*parts[:turn], own, *parts[turn:]]
    rest = _fill(parts, [claim.wanted for claim in claims], capacity - sum(parts))
    equal, odd = divmod(rest, count)
    return [part + equal + (index < odd) for index, part in enumerate(parts)]


def _fill(parts: list[int], wanted: Sequence[int], rest: int) -> int:
    """Raise the smallest parts first, each up to what is wanted; returns what is left."""
    while rest:
        short = [i for i, part in enumerate(parts) if part < wanted[i]]
        if not short:
            break
        lowest = min(parts[i] for i in short)
        lowest_ones = [i for i in short if parts[i] == lowest]
        higher = [parts[i] for i in short if parts[i] > lowest]
        level = min([wanted[i] for i in lowest_ones] + higher)
        step = min(level - lowest, rest // len(lowest_ones))
        if not step:  # less than one for each
            for index in lowest_ones[:rest]:
                parts[index] += 1
            return 0
        for index in lowest_ones:
            parts[index] += step
        rest -= step * len(lowest_ones)
    return rest


@dataclass(slots=True)
class _Account:
    """`tokens` and `calls`: the most that the ServeCore may use now, whatever has got there.
    `offer`: the lease that was sent last."""

    use: LeaseUse
    offer: Lease
    tokens: int = 0
    calls: int = 0


class Division:
    """The leases of `count` ServeCores. One that is lost, or has not been there yet, has none."""

    def __init__(self, count: int) -> None:
        self._accounts: list[_Account | None] = [None] * count
        self._number = 0
        self._turn = 0

    def lease(self, index: int) -> tuple[int, int]:
        """The tokens and calls that this one may use now."""
        account = self._accounts[index]
        return (0, 0) if account is None else (account.tokens, account.calls)

    def offer(self, index: int, max_tokens: int, max_calls: int) -> Lease:
        """The lease for the next heartbeat, of an engine that has so many in all: its fair part,
        or what others have left of that."""
        account = self._accounts[index]
        if account is None:
            nothing = LeaseUse(number=0, tokens=0, calls=0)
            account = self._accounts[index] = _Account(nothing, Lease())
        tokens, calls = self._part(index, max_tokens, max_calls)
        others = [known for known in self._accounts if known is not None and known is not account]
        self._number += 1
        account.offer = Lease(
            number=self._number,
            tokens=min(tokens, max_tokens - sum(known.tokens for known in others)),
            calls=min(calls, max_calls - sum(known.calls for known in others)),
        )
        account.tokens = max(account.tokens, account.offer.tokens)
        account.calls = max(account.calls, account.offer.calls)
        if index == self._turn and account.offer.tokens >= account.use.least_tokens:
            self._turn = self._next_turn(index + 1)
        return account.offer

    def answered(self, index: int, use: LeaseUse | None) -> None:
        """The ServeCore's answer to a heartbeat. It counts if it has got the latest lease."""
        account = self._accounts[index]
        if account is None or use is None or use.number != account.offer.number:
            return
        account.use = use
        account.tokens = max(account.offer.tokens, min(account.tokens, use.tokens))
        account.calls = max(account.offer.calls, min(account.calls, use.calls))

    def lost(self, index: int) -> None:
        """Its lease has ended, and what it did here."""
        self._accounts[index] = None

    def _part(self, index: int, max_tokens: int, max_calls: int) -> tuple[int, int]:
        self._turn = self._next_turn(self._turn)
        present = [i for i, account in enumerate(self._accounts) if account is not None]
        uses = [account.use for account in self._accounts if account is not None]
        turn = present.index(self._turn) if self._turn in present else 0
        tokens = divide(max_tokens, [Claim(u.wanted_tokens, u.least_tokens) for u in uses], turn)
        calls = divide(max_calls, [Claim(u.wanted_calls, min(1, u.wanted_calls)) for u in uses])
        place = present.index(index)
        return tokens[place], calls[place]

    def _next_turn(self, start: int) -> int:
        """The first from this one on that waits for its `least`."""
        count = len(self._accounts)
        for index in range(start, start + count):
            account = self._accounts[index % count]
            if account is not None and account.use.least_tokens:
                return index % count
        return start % count
