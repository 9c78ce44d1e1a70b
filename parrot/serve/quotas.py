"""Quotas: how much one session, and one tenant with all its sessions, may keep in ServeCore."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from parrot.protocol.errors import QueueFull, QuotaExceeded
from parrot.protocol.public import NativeCallRequest, SemanticCallRequest
from parrot.serve.config import SessionQuota, TenantQuota


class Usage(NamedTuple):
    """Amounts of what quotas limit; the fields are named like the keys of the configuration."""

    calls: int = 0
    variables: int = 0
    text_bytes: int = 0

    def plus(self, other: "Usage") -> "Usage":
        return Usage(*[a + b for a, b in zip(self, other, strict=True)])

    def minus(self, other: "Usage") -> "Usage":
        return Usage(*[a - b for a, b in zip(self, other, strict=True)])


def usage_of(request: SemanticCallRequest | NativeCallRequest) -> Usage:
    """What the session keeps for a new call until it ends, but for the texts of its outputs."""
    if isinstance(request, NativeCallRequest):
        texts = [request.func_source]
    else:
        texts = [request.template, request.system or ""]
    texts += [parameter.value for parameter in request.parameters if parameter.value is not None]
    new = sum(parameter.var_id is None for parameter in request.parameters)
    return Usage(calls=1, variables=new, text_bytes=num_bytes(texts))


def num_bytes(texts: Iterable[str]) -> int:
    """The length of the texts in UTF-8. Immediate for ASCII texts, of any length."""
    return sum(
        len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        for text in texts
    )


class Account:
    """What a session or a tenant keeps, and the quota for it. A session's usage also counts for
    its tenant, whose account is its `parent`.

    Only requests are refused: texts that calls make are added without a check, so that no work that
    was done is lost, and the next request is refused instead."""

    def __init__(self, quota: SessionQuota | TenantQuota, parent: "Account | None" = None) -> None:
        self.usage = Usage()
        self._quota = quota
        self._parent = parent

    def require(self, more: Usage) -> None:
        """Raise `QuotaExceeded` naming the limit if there is no room for `more`."""
        for name, wanted in more._asdict().items():
            limit = getattr(self._quota, name)
            if wanted and getattr(self.usage, name) + wanted > limit:
                raise QuotaExceeded(
                    f"{self._quota.holder} would keep more than {limit} {_NOUNS[name]} "
                    f"(`{self._quota.key}.{name}`)"
                )
        if self._parent is not None:
            self._parent.require(more)

    def add(self, more: Usage) -> None:
        self.usage = self.usage.plus(more)
        if self._parent is not None:
            self._parent.add(more)

    def close(self) -> None:
        """The session has ended: its tenant has room again for what it kept."""
        if self._parent is not None:
            self._parent.usage = self._parent.usage.minus(self.usage)
        self.usage = Usage()


_NOUNS = {"calls": "calls", "variables": "variables", "text_bytes": "bytes of text"}


class QueuedByTenant(Counter[str]):
    """The number of queued tasks of each tenant that has some."""

    def enter(self, tenant: str) -> None:
        self[tenant] += 1

    def leave(self, tenant: str) -> None:
        self[tenant] -= 1
        if not self[tenant]:
            del self[tenant]


def require_share(tenant: str, limit: int, *queues: QueuedByTenant) -> None:
    """Raise `QueueFull` if the tenant has its share of a full queue. Shares are equal: `limit` over
    the number of tenants with queued tasks, this one included. So tasks that one tenant queues,
    however many, leave the others their room, and at most `limit` tenants have queued tasks."""
    own = sum(queue[tenant] for queue in queues)
    if own >= limit // len({tenant}.union(*queues)):
        raise QueueFull(
            f"the queue is full (`max_queue_size`: {limit}, of which {own} are yours): "
            "try again later"
        )
