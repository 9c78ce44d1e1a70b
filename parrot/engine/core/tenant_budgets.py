"""Tenant budgets: limits on the step time that the jobs of one tenant may use.

Without limits, a tenant with hundreds of jobs makes each step several times as long as the step of
another tenant's single chat.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from parrot.engine.core.jobs import Job
from parrot.engine.core.shares import TenantShare
from parrot.engine.core.steps import StepCostMeter
from parrot.protocol.engine_api import StepCosts

# A tenant with at most this many jobs, divided by its weight, never crowds another tenant.
_CROWD_JOBS = 16
# A tenant crowds another one if it has more than this many times the other's jobs, by weight.
_CROWD_RATIO = 4
# Seconds after its last job during which a tenant limits crowding tenants, for its next turn.
_LINGER_S = 10.0
# Factor on the allowed step growth after a tenant's last job. A larger value limits crowds less.
_LINGER_GROWTH = 3.0
# Seconds after that during which a returning tenant limits the prompt tokens of other tenants.
_RETURN_S = 600.0
# Prompt tokens in a step of a tenant with many jobs while another tenant may return. A larger value
# delays the first token of the returning tenant. At 1,024, other prompts take 10% longer.
_RETURN_PROMPT_TOKENS = 1024
_MAX_RETURNING = 2  # Tenants that are remembered after they left. One may be the crowding tenant.
_MIN_CHUNK_TOKENS = 32  # Smallest chunk, in tokens, of a limited prompt. Later steps pay for it.
_MIN_BUDGET_S = 1e-6  # Smallest limit, in seconds. It lets a job run once debts are cancelled.
_DEFAULT_COSTS = StepCosts()


@dataclass(slots=True)
class _Tenant:
    """The state of one tenant with recent jobs."""

    weight: float = 1.0
    step_growth: float | None = None
    num_jobs: int = 0  # Open jobs.
    most_jobs: int = 0  # The largest number of open jobs since the tenant was added.
    guarded_until: float = -inf  # Time until which the tenant limits crowding tenants.
    credit_s: float = 0.0  # Seconds of step time that the tenant's jobs may use.


class TenantBudgets:
    """The seconds of step time that the jobs of each crowding tenant may use.

    The limit follows from the `step_growth` of other tenants' requests. Limited jobs wait and keep
    their KV, and limited prompts are computed in small chunks. `begin_step` renews the budgets, and
    `charge` takes from them. A job may exceed its budget; later steps then get less."""

    def __init__(self, costs: StepCostMeter, block_size: int) -> None:
        self._meter = costs
        self._block_size = block_size
        self._costs = _DEFAULT_COSTS
        self._tenants: dict[str, _Tenant] = {}
        # Times at which the last tenants with a `step_growth` left, by tenant.
        self._returning: dict[str, float] = {}
        # Step time left of each crowding tenant. Other tenants have no limit on seconds.
        self._seconds_left: dict[str, float] = {}
        # Prompt tokens left of tenants without a limit on seconds.
        self._prompt_tokens_left: dict[str, int] = {}
        # First blocks of shared prefixes whose KV read is counted already.
        self._counted_prefixes: set[int] = set()

    @property
    def are_limited(self) -> bool:
        """Whether this step limits the seconds of a tenant."""
        return bool(self._seconds_left)

    def enter(self, share: TenantShare, num_jobs: int, most_jobs: int, last_step_at: float) -> None:
        """Add the tenant of all jobs so far, whose last step was planned at `last_step_at`."""
        self._tenants[share.tenant] = _Tenant(
            share.weight, share.step_growth, num_jobs, most_jobs, last_step_at + _LINGER_S
        )

    def add(self, job: Job) -> None:
        """Count an open job."""
        share = job.request.params.share
        tenant = self._tenants.get(share.tenant)
        if tenant is None:
            tenant = self._tenants[share.tenant] = _Tenant()
            self._returning.pop(share.tenant, None)
        tenant.weight = share.weight
        tenant.num_jobs += 1
        tenant.most_jobs = max(tenant.most_jobs, tenant.num_jobs)
        if share.step_growth is not None:
            tenant.step_growth = share.step_growth

    def remove(self, job: Job) -> None:
        self._tenants[job.request.params.share.tenant].num_jobs -= 1

    def begin_step(self, now: float, decoding: Iterable[Job]) -> "TenantBudgets | None":
        """Renew the budgets for the next step, in which the `decoding` jobs generate.

        Returns None if no tenant is limited."""
        self._seconds_left.clear()
        self._prompt_tokens_left.clear()
        self._remove_inactive(now)
        self._limit_prompts(now)
        if len(self._tenants) >= 2:
            self._limit_crowding_tenants(decoding)
        return self if self._seconds_left or self._prompt_tokens_left else None

    def _limit_crowding_tenants(self, decoding: Iterable[Job]) -> None:
        """Set the seconds of the tenants that crowd others."""
        guarded = [(n, t) for n, t in self._tenants.items() if t.step_growth is not None]
        crowded = {
            name: [(n, t) for n, t in guarded if n != name and _crowds(tenant, t)]
            for name, tenant in self._tenants.items()
            if guarded and tenant.num_jobs > _CROWD_JOBS * tenant.weight
        }
        if not any(crowded.values()):
            return
        self._costs = self._meter.recent() or _DEFAULT_COSTS
        self._counted_prefixes.clear()
        own_s = self._decode_s(decoding, dict(guarded))
        self._counted_prefixes.clear()
        for name, others in crowded.items():
            if others:
                tenant = self._tenants[name]
                limit = tenant.weight * min(self._limit_s(t, own_s[n]) for n, t in others)
                tenant.credit_s = min(limit, tenant.credit_s + limit)
                self._seconds_left[name] = tenant.credit_s
                self._prompt_tokens_left.pop(name, None)

    def num_tokens(self, job: Job) -> int:
        """The most tokens of the job that the step may compute."""
        missing, name = job.context.num_missing, job.request.params.share.tenant
        left = self._seconds_left.get(name)
        if left is None:
            if missing > 1 and self._prompt_tokens_left:
                return min(missing, self._prompt_tokens_left.get(name, missing))
            return missing
        if left <= 0.0:
            return 0
        return min(missing, max(_MIN_CHUNK_TOKENS, int(left / self._costs.prefill_s)))

    def charge(self, job: Job, num_tokens: int) -> None:
        """Charge the job's tenant for `num_tokens` tokens in the step."""
        name = job.request.params.share.tenant
        if name in self._seconds_left:
            self._seconds_left[name] -= self._cost_s(job, num_tokens)
            self._tenants[name].credit_s = self._seconds_left[name]
        elif job.context.num_missing > 1 and name in self._prompt_tokens_left:
            self._prompt_tokens_left[name] -= num_tokens

    def forgive_debts(self) -> bool:
        """Cancel the debts of limited tenants, because no other job can run.

        Returns whether a tenant is limited."""
        for name in self._seconds_left:
            self._tenants[name].credit_s = inf
        return bool(self._seconds_left)

    def _remove_inactive(self, now: float) -> None:
        for name, tenant in list(self._tenants.items()):
            if tenant.num_jobs:
                tenant.guarded_until = now + _LINGER_S
            elif tenant.step_growth is None or now >= tenant.guarded_until:
                del self._tenants[name]
                if tenant.step_growth is not None:
                    self._returning[name] = now
                    if len(self._returning) > _MAX_RETURNING:
                        del self._returning[next(iter(self._returning))]

    def _limit_prompts(self, now: float) -> None:
        """Limit the prompt tokens of tenants with many jobs while another tenant may return.

        The first call of the returning tenant would wait for the step in progress."""
        away = [name for name, since in self._returning.items() if now < since + _RETURN_S]
        for name, tenant in self._tenants.items() if away else ():
            if tenant.num_jobs > _CROWD_JOBS * tenant.weight and away != [name]:
                self._prompt_tokens_left[name] = _RETURN_PROMPT_TOKENS

    def _limit_s(self, tenant: _Tenant, own_s: float) -> float:
        """The seconds that a crowding tenant of weight 1 may use in parallel with `tenant`.

        `own_s`: seconds of the decoding jobs of `tenant`, which are the least that is allowed."""
        assert tenant.step_growth is not None, tenant
        growth = tenant.step_growth * (1.0 if tenant.num_jobs else _LINGER_GROWTH)
        return max(_MIN_BUDGET_S, own_s, growth * (self._costs.step_s + own_s)) / tenant.weight

    def _decode_s(self, decoding: Iterable[Job], tenants: dict[str, _Tenant]) -> dict[str, float]:
        own_s = dict.fromkeys(tenants, 0.0)
        for job in decoding:
            if (name := job.request.params.share.tenant) in own_s:
                own_s[name] += self._cost_s(job, 1)
        return own_s

    def _cost_s(self, job: Job, num_tokens: int) -> float:
        costs, context = self._costs, job.context
        if num_tokens > 1:
            return num_tokens * costs.prefill_s
        num_read = len(context.token_ids)
        if context.owned_from:  # A step reads a shared prefix once.
            if context.block_ids[0] in self._counted_prefixes:
                num_read -= context.owned_from * self._block_size
            self._counted_prefixes.add(context.block_ids[0])
        return costs.sequence_s + num_read * costs.token_s

    def check_integrity(self, jobs: Iterable[Job]) -> None:
        """Compare the counts with the open jobs. Raises AssertionError with the difference."""
        counts = {name: tenant.num_jobs for name, tenant in self._tenants.items()}
        for job in jobs:
            counts[job.request.params.share.tenant] -= 1
        assert not any(counts.values()), counts


def _crowds(tenant: _Tenant, other: _Tenant) -> bool:
    """Whether `tenant` has more than `_CROWD_RATIO` times the jobs of `other`, by weight.

    Without open jobs, the largest earlier number of `other` counts."""
    most = other.num_jobs or other.most_jobs
    return tenant.num_jobs / tenant.weight > max(_CROWD_JOBS, _CROWD_RATIO * most / other.weight)
