"""The virtual token counter ("Fairness in Serving Large Language Models", OSDI'24): the service
that each tenant has had, over its weight. Of those that wait, the one with the least comes first.

Service is counted in seconds of an engine, by what engines report: each prompt token that is
computed, and each output token with what it reads and its part of a step. A beginning that is there
already, or that a running prompt has, is its first user's to pay."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from parrot.protocol.engine_api import StepCosts
from parrot.serve.scheduling.task import CompletionTask
from parrot.utils.heaps import LazyHeap, LruDict

_SHARED_BY = 64  # sequences of a step, among which what every step costs is divided
_TIMES = 2  # as many tasks, by weight, are under way on average beside a small tenant
_MAX_IDLE = 4096  # tenants with nothing to do whose counters are remembered

Weigh = Callable[[str], float]
"""The weight of a tenant: of two that wait all the time, one with twice the weight gets twice as
much."""


def service_s(costs: StepCosts, num_computed: int, num_read: int, num_output: int) -> float:
    """Seconds of an engine that a call takes: `num_computed` tokens of its prompt, and `num_output`
    tokens, each of which reads `num_read` of the prompt's and the output before it."""
    read_s = (num_read + num_output / 2) * costs.token_s
    token_s = costs.step_s / _SHARED_BY + costs.sequence_s + read_s
    return num_computed * costs.prefill_s + num_output * token_s


@dataclass(slots=True)
class _Account:
    """`num_charged`: of its tasks, those that have not ended."""

    counter: float
    weight: float
    num_queued: int = 0
    num_charged: int = 0


class _Charge(NamedTuple):
    """The service that a placed task was predicted to take, in `duration_s` seconds from `at`."""

    service_s: float
    num_read: int
    costs: StepCosts
    at: float
    duration_s: float


class Counters:
    """The counters of all tenants, of the weights that `weigh` gives. A placed task is charged by
    prediction, and what it took in fact is settled when it ends. A tenant that begins to wait is
    lifted to the least of those that wait already, or, if none does, to whoever did last: time
    without work is no credit."""

    def __init__(self, weigh: Weigh) -> None:
        self.weigh = weigh
        self._accounts: dict[str, _Account] = {}  # of those with a task
        self._weight = 0.0  # of all these
        self._idle: LruDict[str, float] = LruDict(_MAX_IDLE)
        # By counters that may have grown since. Empty while there is one tenant.
        self._waiting: LazyHeap[str, float] = LazyHeap()
        self._floor = 0.0  # the counter of the last one that waited
        self._charges: dict[CompletionTask, _Charge] = {}

    @property
    def are_many(self) -> bool:
        """Whether more than one tenant has tasks."""
        return len(self._accounts) > 1

    def counter(self, tenant: str) -> float:
        """Seconds of service over its weight. It must have a task."""
        return self._accounts[tenant].counter

    def weight(self, tenant: str) -> float:
        """As long as it has tasks, the weight that it had when it got the first."""
        account = self._accounts.get(tenant)
        return self.weigh(tenant) if account is None else account.weight

    def is_small(self, tenant: str) -> bool:
        """Whether it has few tasks under way, by weight, beside the others."""
        own = self._accounts[tenant]
        return _TIMES * own.num_charged * self._weight < len(self._charges) * own.weight

    def queued(self, tenant: str) -> None:
        """One more task of the tenant waits."""
        account = self._accounts.get(tenant)
        if account is None:
            counter = self._idle.pop(tenant) or 0.0
            if len(self._accounts) == 1:
                self._no_longer_alone()
            account = self._accounts[tenant] = _Account(counter, self.weigh(tenant))
            self._weight += account.weight
        account.num_queued += 1
        if account.num_queued == 1:
            account.counter = max(account.counter, self._least())
            if len(self._accounts) > 1:
                self._waiting.set(tenant, account.counter)

    def unqueued(self, tenant: str) -> None:
        """One task less waits: it will not run."""
        account = self._accounts[tenant]
        self._leave_queue(tenant, account)
        self._forget(tenant, account)

    def charge(
        self,
        task: CompletionTask,
        costs: StepCosts,
        *,
        num_computed: int,
        num_read: int,
        now: float,
        duration_s: float,
    ) -> None:
        """A queued task was placed, and is predicted to take so many seconds."""
        taken_s = service_s(costs, num_computed, num_read, task.expected_output)
        self._charges[task] = _Charge(taken_s, num_read, costs, now, duration_s)
        tenant = task.tenant
        account = self._accounts[tenant]
        account.num_charged += 1
        account.counter += taken_s / account.weight
        self._leave_queue(tenant, account)

    def settle(self, task: CompletionTask, now: float) -> tuple[float, bool]:
        """The task has ended. Returns the seconds of service that it has had, and whether that is
        less than it was charged: by the tokens that its engine counted, or, if it was stopped, the
        part of its prediction for which it ran."""
        charge = self._charges.pop(task)
        if task.used is not None:
            num_computed, num_output = task.used
            taken_s = service_s(charge.costs, num_computed, charge.num_read, num_output)
        elif now - charge.at < charge.duration_s:
            taken_s = charge.service_s * (now - charge.at) / charge.duration_s
        else:
            taken_s = charge.service_s
        tenant = task.tenant
        account = self._accounts[tenant]
        account.num_charged -= 1
        account.counter += (taken_s - charge.service_s) / account.weight
        if account.num_queued:
            if len(self._accounts) > 1 and account.counter < self._waiting.key(tenant):
                self._waiting.set(tenant, account.counter)
        elif not account.num_charged:
            self._forget(tenant, account)
        return taken_s, taken_s < charge.service_s

    def _no_longer_alone(self) -> None:
        ((tenant, account),) = self._accounts.items()
        if account.num_queued:
            self._waiting.set(tenant, account.counter)

    def _leave_queue(self, tenant: str, account: _Account) -> None:
        account.num_queued -= 1
        if not account.num_queued:
            self._waiting.discard(tenant)
            self._floor = account.counter

    def _least(self) -> float:
        """The least counter of those that wait, or that of the last one that did."""
        while (first := self._waiting.top()) is not None:
            known, tenant = first
            counter = self._accounts[tenant].counter
            if counter <= known:
                return counter
            self._waiting.set(tenant, counter)
        return self._floor

    def _forget(self, tenant: str, account: _Account) -> None:
        if not account.num_queued and not account.num_charged:
            del self._accounts[tenant]
            self._weight = self._weight - account.weight if self._accounts else 0.0
            if len(self._accounts) < 2:
                self._waiting.clear()
            self._idle.put(tenant, account.counter)

    def check_integrity(self, num_queued: dict[str, int], num_placed: dict[str, int]) -> None:
        """Recount by the tenants' tasks. Raises AssertionError with what differs."""
        accounts = self._accounts
        queued = {name: a.num_queued for name, a in accounts.items() if a.num_queued}
        placed = {name: a.num_charged for name, a in accounts.items() if a.num_charged}
        assert queued == num_queued, (queued, num_queued)
        assert placed == num_placed, (placed, num_placed)
        assert len(self._charges) == sum(placed.values()), self._charges
        assert set(self._waiting) == (set(queued) if self.are_many else set()), queued
        assert all(self._waiting.key(name) <= accounts[name].counter for name in self._waiting)
