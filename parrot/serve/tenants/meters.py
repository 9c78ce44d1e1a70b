"""The use that tenants make now and by the minute, against the limits of their keys."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from parrot.protocol.errors import ParrotError, QueueFull, RateLimited
from parrot.serve.tenants.table import TenantTable
from parrot.utils.clock import Clock

_MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    """The amount that a tenant may use yet: `per_minute` comes in a minute, up to as much. Below 0
    is what was used too much. `at`: when it had `level`."""

    per_minute: int
    level: float
    at: float

    def refill(self, per_minute: int, now: float) -> None:
        """Up to now, at the rate that it had."""
        gained = (now - self.at) / _MINUTE_S * self.per_minute
        self.level, self.at = min(self.level + gained, float(per_minute)), now
        self.per_minute = per_minute

    def wait_s(self, level: float) -> float:
        """Until it has so much."""
        return max(0.0, level - self.level) / self.per_minute * _MINUTE_S


class Meters:
    """Counts what tenants do, and refuses what is beyond their limits. A call is charged when it
    begins what it is expected to use, and the rest, or less, when it ends; so a tenant is refused
    by what its calls under way will use, and what one uses too much delays the next."""

    def __init__(self, tenants: TenantTable, clock: Clock) -> None:
        self._tenants = tenants
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._charged: dict[int, tuple[str, int]] = {}  # by task: its tenant, and tokens
        self._tokens: dict[str, _Bucket] = {}
        self._requests: dict[str, _Bucket] = {}

    def admit(self, tenant_id: str) -> None:
        """Count a request that may set work going. Raises `QueueFull`, or `RateLimited` with the
        time when it may come again; then it has not been counted."""
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

    def counts_tokens(self, tenant_id: str) -> bool:
        tenant = self._tenants.find(tenant_id)
        return tenant is not None and tenant.limits.tokens_per_minute is not None

    def began(self, task_id: int, tenant_id: str, expected_tokens: int) -> None:
        self._running[tenant_id] += 1
        self._charged[task_id] = (tenant_id, expected_tokens)
        self.charge(tenant_id, expected_tokens)

    def ended(self, task_id: int, used_tokens: int) -> None:
        """No effect if it has not begun."""
        tenant_id, expected = self._charged.pop(task_id, ("", 0))
        if tenant_id:
            self._leave(tenant_id)
            self.charge(tenant_id, used_tokens - expected)

    @contextmanager
    def running(self, tenant_id: str, expected_tokens: int) -> Iterator[None]:
        """For the block that does what is no task of a graph. What is used otherwise is charged
        behind it; if the block raises a `ParrotError`, nothing was."""
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
        """Less than 0 is given back."""
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
        """The tenant's, as it is now; a new one is full."""
        now = self._clock.now()
        if (bucket := buckets.get(tenant_id)) is None:
            bucket = buckets[tenant_id] = _Bucket(per_minute, float(per_minute), now)
        bucket.refill(per_minute, now)
        return bucket

    def _require(self, tenant_id: str, bucket: _Bucket, level: float, name: str) -> None:
        if bucket.level < level:
            raise RateLimited(
                f"{tenant_id} has used its {bucket.per_minute} for now (`limits.{name}`)",
                retry_after_s=bucket.wait_s(level),
            )
