"""How an engine's capacity is divided among the ServeCores that share it.

A ServeCore has a *lease*: so many tokens of KV and calls at once. A lease grows when the engine
sends a larger one, but shrinks only when the ServeCore has answered that it has got the smaller one
and what it still uses. Until then the larger one counts, so whatever is lost on the way, and
whatever comes late, the leases are never more than the capacity in sum."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parrot.protocol.engine_api import Lease, LeaseUse

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
        self._size = (0, 0)  # tokens and calls of the engine
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
        self._size = (max_tokens, max_calls)
        tokens, calls = self._parts()[index]
        free_tokens, free_calls = self._left_by_others(account)
        self._number += 1
        account.offer = Lease(
            number=self._number,
            tokens=min(tokens, free_tokens),
            calls=min(calls, free_calls),
            is_wanted=self._is_wanted(account),
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

    def due(self) -> list[int]:
        """Those whose next lease somebody waits for: it has more of what this one wants, or less,
        or others have begun to want what this one does not use."""
        return [
            index
            for index, (tokens, calls) in self._parts().items()
            if (account := self._accounts[index]) is not None
            and (self._gains(account, tokens, calls) or self._yields(account, tokens, calls))
        ]

    def _gains(self, account: _Account, tokens: int, calls: int) -> bool:
        """Whether more of what it wants is free, within its fair part."""
        free_tokens, free_calls = self._left_by_others(account)
        use, offer = account.use, account.offer
        return (
            min(use.wanted_tokens, tokens, free_tokens) > offer.tokens
            or min(use.wanted_calls, calls, free_calls) > offer.calls
        )

    def _yields(self, account: _Account, tokens: int, calls: int) -> bool:
        """Whether others want what is not its fair part any more, or what it may come not to use,
        and it does not know."""
        offer = account.offer
        has_more = offer.tokens > tokens or offer.calls > calls
        return self._is_wanted(account) and (has_more or not offer.is_wanted)

    def _is_wanted(self, account: _Account) -> bool:
        """Whether others want more than they have."""
        return any(
            one.use.wanted_tokens > one.offer.tokens or one.use.wanted_calls > one.offer.calls
            for one in self._accounts
            if one is not None and one is not account
        )

    def _left_by_others(self, account: _Account) -> tuple[int, int]:
        others = [one for one in self._accounts if one is not None and one is not account]
        max_tokens, max_calls = self._size
        tokens = max_tokens - sum(one.tokens for one in others)
        return tokens, max_calls - sum(one.calls for one in others)

    def _parts(self) -> dict[int, tuple[int, int]]:
        """The fair parts of all that are there, in tokens and calls."""
        self._turn = self._next_turn(self._turn)
        present = [i for i, account in enumerate(self._accounts) if account is not None]
        if not present:
            return {}
        uses = [account.use for account in self._accounts if account is not None]
        turn = present.index(self._turn) if self._turn in present else 0
        max_tokens, max_calls = self._size
        tokens = divide(max_tokens, [Claim(u.wanted_tokens, u.least_tokens) for u in uses], turn)
        calls = divide(max_calls, [Claim(u.wanted_calls, min(1, u.wanted_calls)) for u in uses])
        return dict(zip(present, zip(tokens, calls, strict=True), strict=True))

    def _next_turn(self, start: int) -> int:
        """The first from this one on that waits for its `least`."""
        count = len(self._accounts)
        for index in range(start, start + count):
            account = self._accounts[index % count]
            if account is not None and account.use.least_tokens:
                return index % count
        return start % count
