"""On which shard the sessions of an application begin, so that they share what its engines keep."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import NamedTuple, Self

from starlette.requests import Request

from parrot.protocol.errors import MisdirectedRequest
from parrot.serve.shards.shard import ElsewhereError, Shard

FORWARDED = "x-parrot-forwarded"
"""The header of requests that were handed on."""
LOAD = "x-parrot-load"
"""The header that says how full the shard is that was asked."""
STAYS = "parrot_stays"
"""Set in the scope of a request that its home has not taken."""
_MOST_TIMES, _MOST_MORE = 1.25, 16


def home(tenant: str, app: str, cores: Sequence[str]) -> int:
    """The shard of a tenant's application, by rendezvous hashing: the one whose address has the
    greatest hash together with both. With one shard more, or less, few applications move."""

    def weight(index: int) -> bytes:
        return sha256("\0".join((tenant, app, cores[index])).encode(errors="replace")).digest()

    return max(range(len(cores)), key=weight)


class Load(NamedTuple):
    """How full a shard is: its sessions, which keep KV, and its calls, which run or wait. Each says
    nothing of the other: short sessions are few at a time, however many calls they make."""

    sessions: int
    calls: int

    @classmethod
    def parse(cls, header: str) -> Self | None:
        """None if it is no load."""
        numbers = header.split()
        if len(numbers) != len(cls._fields) or not all(map(str.isdecimal, numbers)):
            return None
        return cls(*(int(number[:9]) for number in numbers))

    @property
    def header(self) -> bytes:
        return b"%d %d" % self

    def is_much_above(self, asked: "Load") -> bool:
        """Whether a shard leaves new sessions of its applications to the one that was asked."""
        return any(
            own > _MOST_TIMES * its + _MOST_MORE for own, its in zip(self, asked, strict=True)
        )


class Affinity:
    """Sends what begins a session to its application's shard, unless that has much more to do than
    the shard that was asked. `load` says how much this one has."""

    def __init__(self, shard: Shard, cores: Sequence[str], load: Callable[[], Load]) -> None:
        self._shard = shard
        self._cores = cores
        self._load = load

    def check(self, request: Request, tenant: str, apps: Sequence[str]) -> None:
        """Whether the session may begin here: raises `ElsewhereError` if another shard is its home,
        and `MisdirectedRequest` if it was sent on to this one, which is much fuller."""
        if FORWARDED in request.headers:
            asked = Load.parse(request.headers.get(LOAD, ""))
            if asked is not None and self._load().is_much_above(asked):
                raise MisdirectedRequest("this shard has much more to do than the one asked first")
        elif apps and STAYS not in request.scope:
            index = home(tenant, apps[0], self._cores)
            if index != self._shard.index:
                raise ElsewhereError(index, may_stay=True)
