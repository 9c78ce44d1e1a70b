"""Quotas: how much one session, and one tenant with all its sessions, may keep in ServeCore, and
how long their native functions may run."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import orjson

from parrot.protocol.errors import ClusterFull, QuotaExceeded
from parrot.protocol.public import GraphVariable, NativeCallRequest, SemanticCallRequest
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.config import SessionQuota, TenantQuota


def usage_of(request: SemanticCallRequest | NativeCallRequest) -> dict[str, int]:
    """Amounts that a session keeps for a new call until it ends, without the outputs' texts and the
    time that it runs."""
    native_ms = 0
    if isinstance(request, NativeCallRequest):
        texts, native_ms = [request.func_source], 1  # the least that is counted
    else:
        texts = [request.template, request.system or "", *request.models]
    num_new = 0
    for parameter in request.parameters:
        num_new += parameter.var_id is None
        if parameter.value is not None:
            texts.append(parameter.value)
        if parameter.sampling_config is not None:
            texts += _grammar(parameter.sampling_config)
    return {
        "calls": 1,
        "variables": num_new,
        "text_bytes": num_bytes(texts),
        "native_ms": native_ms,
    }


def usage_of_graph(
    declared: Sequence[GraphVariable],
    num_variables: int,
    calls: Iterable[SemanticCallRequest | NativeCallRequest],
) -> Counter[str]:
    """Amounts for all of a graph: `num_variables` of its own, of which some are `declared` with
    their contents, and its calls, which name them by ids."""
    texts = [variable.content or "" for variable in declared]
    usage = Counter(variables=num_variables, text_bytes=num_bytes(texts))
    for call in calls:
        usage.update(usage_of(call))
    return usage


def _grammar(sampling: SamplingConfig) -> list[str]:
    schema = sampling.json_schema
    return [
        sampling.regex or sampling.grammar or "",
        *(sampling.choices or ()),
        orjson.dumps(schema).decode() if isinstance(schema, dict) else schema or "",
    ]


def num_bytes(texts: Iterable[str]) -> int:
    """The length of the texts in UTF-8. Immediate for ASCII texts, of any length."""
    return sum(
        len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        for text in texts
    )


_AMOUNTS = {
    "text_bytes": "keep more than {} bytes of text",
    "native_ms": "run native functions for more than {} ms",
}


class TenantQuotaExceeded(QuotaExceeded):
    """It is the tenant's own doing: others need not make room."""


class Account:
    """The amounts that a session or a tenant keeps, named like the keys of their quota. A session's
    also count for its tenant, whose account is its `parent`.

    Only requests are refused: texts that calls make are added without a check, so that no work that
    was done is lost, and the next request is refused instead. `own`: limits of a tenant's key, in
    the place of the quota's, or where that has none."""

    def __init__(
        self,
        quota: SessionQuota | TenantQuota,
        parent: "Account | None" = None,
        own: Mapping[str, int] | None = None,
    ) -> None:
        self.used: Counter[str] = Counter()
        self.parent = parent
        self.own: Mapping[str, int] = own or {}
        self._quota = quota

    def require(self, **more: int) -> None:
        """Raise `QuotaExceeded` naming the limit if there is no room for `more`."""
        quota = self._quota
        for name, amount in more.items():
            limit = self.own.get(name, getattr(quota, name, None))
            if limit is not None and amount and self.used[name] + amount > limit:
                what = _AMOUNTS.get(name, f"keep more than {{}} {name}").format(limit)
                key = "limits" if name in self.own else quota.key
                kind = QuotaExceeded if self.parent is not None else TenantQuotaExceeded
                raise kind(f"{quota.holder} would {what} (`{key}.{name}`)")
        if self.parent is not None:
            self.parent.require(**more)

    def add(self, **more: int) -> None:
        for name, amount in more.items():
            self.used[name] += amount
        if self.parent is not None:
            self.parent.add(**more)

    def close(self) -> None:
        """The session has ended: its tenant has room again for what it kept, and what comes late
        is not counted for the tenant, who would never have room for it again."""
        if self.parent is not None:
            self.parent.used.subtract(self.used)
            self.parent = None


class QueuedByTenant(Counter[str]):
    """The number of queued tasks of each tenant that has some."""

    def enter(self, tenant: str) -> None:
        self[tenant] += 1

    def leave(self, tenant: str) -> None:
        self[tenant] -= 1
        if not self[tenant]:
            del self[tenant]


def require_share(
    tenant: str,
    limit: int,
    weigh: Callable[[str], float],
    wait_s: float | None,
    *queues: QueuedByTenant,
) -> None:
    """Raise `ClusterFull`, to be tried again in `wait_s`, if the tenant has its share of a full
    queue. Shares are parts of `limit` by the weights of the tenants with queued tasks, this one
    included; each of up to `limit` tenants may have one task. So tasks that one tenant queues,
    however many, leave the others their room."""
    own = sum(queue[tenant] for queue in queues)
    tenants = {tenant}.union(*queues)
    part = limit * weigh(tenant) / sum(map(weigh, tenants))
    if own >= max(int(part), len(tenants) <= limit):
        raise ClusterFull(
            f"the queue is full (`max_queue_size`: {limit}, of which {own} are yours): "
            "try again later",
            retry_after_s=wait_s,
        )
