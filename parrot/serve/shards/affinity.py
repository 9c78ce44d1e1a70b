"""On which shard the sessions of an application begin, so that they share what its engines keep."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from heapq import nlargest
from typing import NamedTuple, Self

from starlette.requests import Request

from parrot.protocol.errors import MisdirectedRequest
from parrot.utils.shard import ElsewhereError, Shard

FORWARDED = "x-parrot-forwarded"
"""The header of requests that were handed on."""
LOAD = "x-parrot-load"
"""The header that says how full the shard is that was asked."""
STAYS = "parrot_stays"
"""Set in the scope of a request that none of its homes has taken."""
_MOST_TIMES, _MOST_MORE, _MOST_KV = 1.25, 16, 50
_NUM_HOMES = 3


def homes(tenant: str, app: str, cores: Sequence[str]) -> list[int]:
    """The shards of a tenant's application, by rendezvous hashing: those whose addresses have the
    greatest hashes together with both, the greatest first. With one shard more, or less, few
    applications move."""

    def weight(index: int) -> bytes:
        return sha256("\0".join((tenant, app, cores[index])).encode(errors="replace")).digest()

    return nlargest(_NUM_HOMES, range(len(cores)), key=weight)


class Load(NamedTuple):
    """How full a shard is: its sessions, its calls, which run or wait, and the percentage of its
    engines' KV that contexts of live sessions have. None says anything of the others: short
    sessions are few at a time, however many calls they make, and an agent has more KV than many
    chats."""

    sessions: int
    calls: int
    kv: int

    @classmethod
    def parse(cls, header: str) -> Self | None:
        """None if it is no load."""
        numbers = header.split()
        if len(numbers) != len(cls._fields) or not all(map(str.isdecimal, numbers)):
            return None
        return cls(*(int(number[:9]) for number in numbers))

    @property
    def header(self) -> bytes:
        return b"%d %d %d" % self

    def yields_to(self, asked: "Load") -> bool:
        """Whether a shard leaves new sessions of its applications to others, since it has much more
        sessions or calls than the one that was asked, or little KV left, and less."""
        counts = ((self.sessions, asked.sessions), (self.calls, asked.calls))
        has_more = any(own > _MOST_TIMES * its + _MOST_MORE for own, its in counts)
        return has_more or self.kv > max(_MOST_KV, asked.kv)


class Affinity:
    """Sends what begins a session to the first of its application's shards that is not much fuller
    than the shard that was asked. `load` says how full this one is."""

    def __init__(self, shard: Shard, cores: Sequence[str], load: Callable[[], Load]) -> None:
        self._shard = shard
        self._cores = cores
        self._load = load

    def check(self, request: Request, tenant: str, apps: Sequence[str]) -> None:
        """Whether the session may begin here: raises `ElsewhereError` if other shards come first,
        and `MisdirectedRequest` if it was sent on to this one, which is much fuller."""
        if FORWARDED in request.headers:
            asked = Load.parse(request.headers.get(LOAD, ""))
            if asked is not None and self._load().yields_to(asked):
                raise MisdirectedRequest("this shard is much fuller than the one asked first")
        elif apps and STAYS not in request.scope:
            found, own = homes(tenant, apps[0], self._cores), self._shard.index
            if before := found[: found.index(own)] if own in found else found:
                raise ElsewhereError(*before, may_stay=True)
