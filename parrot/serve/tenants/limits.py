"""The limits of tenants. Quotas limit the data in ServeCore and the time of native functions, for a
session and for a tenant. Rates limit the current calls of a tenant, and its use per minute."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import orjson

from parrot.protocol.errors import ClusterFull, ParrotError, QueueFull, QuotaExceeded, RateLimited
from parrot.protocol.public import GraphVariable, NativeCallRequest, SemanticCallRequest
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.config import SessionQuota, TenantQuota
from parrot.serve.tenants.table import Tenant, TenantTable
from parrot.utils.clock import Clock

_MINUTE_S = 60.0


def usage_of(request: SemanticCallRequest | NativeCallRequest) -> dict[str, int]:
    """The quota usage of a new call until its session ends. Values of outputs and run time are
    added later."""
    native_ms = 0
    if isinstance(request, NativeCallRequest):
        texts, native_ms = [request.func_source], 1  # the smallest amount that is counted
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
    """The quota usage of a graph: its `num_variables` variables, of which some are `declared` with
    contents, and its calls."""
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
    """The number of bytes of the texts in UTF-8; fast for ASCII texts."""
    return sum(
        [
            len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
            for text in texts
        ]
    )


_AMOUNTS = {
    "text_bytes": "keep more than {} bytes of text",
    "native_ms": "run native functions for more than {} ms",
}


class TenantQuotaExceeded(QuotaExceeded):
    """The tenant's own quota is used up. Ending other tenants' sessions would not help."""


class Quota:
    """The usage and limits of a session or a tenant, by the names of the quota's keys. A session's
    usage also counts for its `parent`, the tenant's account. Only requests are rejected. Outputs of
    calls are added without a check, so that finished work is not lost."""

    def __init__(
        self,
        quota: SessionQuota | TenantQuota,
        parent: "Quota | None" = None,
        own: Mapping[str, int] | None = None,
    ) -> None:
        self.used: defaultdict[str, int] = defaultdict(int)
        self.parent = parent
        self.own: Mapping[str, int] = own or {}  # limits of the tenant's key, which come first
        self._quota = quota
        self._limits = quota.limits

    def require(self, **more: int) -> None:
        """Raise `QuotaExceeded` with the limit's name if `more` would exceed it."""
        quota: Quota | None = self
        while quota is not None:
            for name, amount in more.items():
                limit = quota.own.get(name, quota._limits.get(name))
                if limit is not None and amount and quota.used[name] + amount > limit:
                    raise quota._exceeded(name, limit)
            quota = quota.parent

    def _exceeded(self, name: str, limit: int) -> QuotaExceeded:
        what = _AMOUNTS.get(name, f"keep more than {{}} {name}").format(limit)
        key = "limits" if name in self.own else self._quota.key
        kind = QuotaExceeded if self.parent is not None else TenantQuotaExceeded
        return kind(f"{self._quota.holder} would {what} (`{key}.{name}`)")

    def add(self, **more: int) -> None:
        for name, amount in more.items():
            self.used[name] += amount
        if self.parent is not None:
            self.parent.add(**more)

    def used_share(self) -> float:
        """The used share of the most used of the tenant's own limits; 0 without such a limit."""
        return max((self.used[name] / limit for name, limit in self.own.items()), default=0.0)

    def close(self) -> None:
        """The session has ended: subtract its usage from the tenant's. Usage that is added later
        does not count for the tenant, because it would never be subtracted."""
        if self.parent is not None:
            for name, amount in self.used.items():
                self.parent.used[name] -= amount
            self.parent = None


class QueuedByTenant(Counter[str]):
    """The number of queued tasks of each tenant; tenants without tasks are removed."""

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
    *queues: Counter[str],
) -> None:
    """Raise `ClusterFull` if the tenant has used its share of a full queue. The share is `limit`
    divided by the weights of the tenants with queued tasks, including this one. Each tenant may
    have at least one task, for up to `limit` tenants. `wait_s`: the error's `retry_after_s`."""
    own = sum(queue[tenant] for queue in queues)
    tenants = {tenant}.union(*queues)
    part = limit * weigh(tenant) / sum(map(weigh, tenants))
    if own >= max(int(part), len(tenants) <= limit):
        raise ClusterFull(
            f"the queue is full (`max_queue_size`: {limit}; {own} of these calls are yours): "
            "try again later",
            retry_after_s=wait_s,
        )


@dataclass(slots=True)
class _Bucket:
    """A token bucket: the amount that a tenant may still use. It is refilled with `per_minute` each
    minute, up to `per_minute`. `level` is negative after calls that used more than expected."""

    per_minute: int
    level: float
    at: float  # the time of `level`

    def refill(self, per_minute: int, now: float) -> None:
        """Refill the bucket up to now with the old rate, and set the new rate."""
        gained = (now - self.at) / _MINUTE_S * self.per_minute
        self.level, self.at = min(self.level + gained, float(per_minute)), now
        self.per_minute = per_minute

    def wait_s(self, level: float) -> float:
        """Seconds until the bucket has this level."""
        return max(0.0, level - self.level) / self.per_minute * _MINUTE_S


class Meters:
    """Counts the tenants' calls and rejects those beyond their limits. A call is charged its
    expected tokens when it begins, and the difference to its actual tokens when it ends. So calls
    in flight count, and a call that used more than expected delays the next one."""

    def __init__(self, tenants: TenantTable, clock: Clock) -> None:
        self._tenants = tenants
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._charged: dict[int, tuple[str, int]] = {}  # tenant and charged tokens, by task
        self._tokens: dict[str, _Bucket] = {}
        self._requests: dict[str, _Bucket] = {}

    def admit(self, tenant_id: str) -> None:
        """Count a request that may start work. Raises `QueueFull`, or `RateLimited` with the time
        of the next attempt. A rejected request is not counted."""
        tenant = self._tenants.find(tenant_id)
        if tenant is None:
            return
        limits = tenant.limits
        running, most = self._running[tenant_id], limits.calls_in_flight
        if most is not None and running >= most:
            raise QueueFull(f"{tenant_id} has {running} calls in flight (`limits.calls_in_flight`)")
        if limits.tokens_per_minute is not None:
            tokens = self._bucket(self._tokens, tenant_id, limits.tokens_per_minute)
            self._require(tenant_id, tokens, 1.0, "tokens_per_minute")
        if limits.requests_per_minute is not None:
            requests = self._bucket(self._requests, tenant_id, limits.requests_per_minute)
            self._require(tenant_id, requests, 1.0, "requests_per_minute")
            requests.level -= 1

    def num_running(self, tenant_id: str) -> int:
        return self._running[tenant_id]

    def used_share(self, tenant: Tenant) -> float:
        """The used share of the tenant's most used limit; 0 if it has none of these limits."""
        limits, shares = tenant.limits, [0.0]
        if limits.calls_in_flight is not None:
            shares.append(self._running[tenant.id] / limits.calls_in_flight)
        for buckets, limit in (
            (self._tokens, limits.tokens_per_minute),
            (self._requests, limits.requests_per_minute),
        ):
            if limit is not None:
                shares.append(1 - self._bucket(buckets, tenant.id, limit).level / limit)
        return max(shares)

    def counts_tokens(self, tenant_id: str) -> bool:
        tenant = self._tenants.find(tenant_id)
        return tenant is not None and tenant.limits.tokens_per_minute is not None

    def began(self, task_id: int, tenant_id: str, expected_tokens: int) -> None:
        self._running[tenant_id] += 1
        self._charged[task_id] = (tenant_id, expected_tokens)
        self.charge(tenant_id, expected_tokens)

    def ended(self, task_id: int, used_tokens: int) -> None:
        """A task has ended. Does nothing if it has not begun."""
        tenant_id, expected = self._charged.pop(task_id, ("", 0))
        if tenant_id:
            self._leave(tenant_id)
            self.charge(tenant_id, used_tokens - expected)

    @contextmanager
    def running(self, tenant_id: str, expected_tokens: int) -> Iterator[None]:
        """Charge work that is not a task of a graph, while the block runs. The caller charges the
        difference to the actual tokens. If the block raises a `ParrotError`, nothing is charged."""
        self._running[tenant_id] += 1
        self.charge(tenant_id, expected_tokens)
        try:
            yield
        except ParrotError:
            self.charge(tenant_id, -expected_tokens)
            raise
        finally:
            self._leave(tenant_id)

    def charge(self, tenant_id: str, num_tokens: int) -> None:
        """Charge tokens; a negative number is a refund."""
        tenant = self._tenants.find(tenant_id)
        if tenant is not None and tenant.limits.tokens_per_minute is not None:
            limit = tenant.limits.tokens_per_minute
            self._bucket(self._tokens, tenant_id, limit).level -= num_tokens

    def check_integrity(self) -> None:
        tasks = Counter(tenant for tenant, _ in self._charged.values())
        assert tasks <= self._running, (tasks, self._running)
        assert all(self._running.values()), self._running

    def _leave(self, tenant_id: str) -> None:
        self._running[tenant_id] -= 1
        if not self._running[tenant_id]:
            del self._running[tenant_id]

    def _bucket(self, buckets: dict[str, _Bucket], tenant_id: str, per_minute: int) -> _Bucket:
        """The tenant's bucket, refilled up to now. A new bucket is full."""
        now = self._clock.now()
        if (bucket := buckets.get(tenant_id)) is None:
            bucket = buckets[tenant_id] = _Bucket(per_minute, float(per_minute), now)
        bucket.refill(per_minute, now)
        return bucket

    def _require(self, tenant_id: str, bucket: _Bucket, level: float, name: str) -> None:
        if bucket.level < level:
            raise RateLimited(
                f"{tenant_id} has used its {bucket.per_minute} per minute (`limits.{name}`)",
                retry_after_s=bucket.wait_s(level),
            )
