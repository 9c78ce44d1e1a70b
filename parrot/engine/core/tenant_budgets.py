"""Tenant budgets: how much of a step the jobs of each tenant may take."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from parrot.engine.core.jobs import Job
from parrot.engine.core.shares import TenantShare
from parrot.engine.core.steps import StepCostMeter
from parrot.protocol.engine_api import StepCosts

_CROWD_JOBS = 16  # jobs by weight: a tenant with fewer crowds nobody
_CROWD_RATIO = 4  # a tenant crowds another when it has this many times its jobs by weight
_LINGER_S = 10.0  # a tenant that left so lately may come back for its next turn
_LINGER_GROWTH = 3.0  # steps may grow by this many times what they may beside a tenant that stays
_RETURN_S = 600.0  # a tenant that left is remembered for so long
_RETURN_PROMPT_TOKENS = (
    1024  # of a crowd's prompts in a step while one is remembered: a tenth dearer
)
_MAX_RETURNING = 2  # tenants that are remembered so: the crowd itself may be one
_MIN_CHUNK_TOKENS = 32  # tokens of a prompt; what they take too much is paid by later steps
_MIN_BUDGET_S = 1e-6  # so that something may be computed where nobody else has anything
_DEFAULT_COSTS = StepCosts()


@dataclass(slots=True)
class _Tenant:
    """`num_jobs` are open; `most_jobs` were, since it came. `credit_s`: what its jobs may take of
    the next step."""

    weight: float = 1.0
    step_growth: float | None = None
    num_jobs: int = 0
    most_jobs: int = 0
    guarded_until: float = -inf
    credit_s: float = 0.0


class TenantBudgets:
    """The seconds that each tenant's jobs may take of a step. Without bounds a tenant with hundreds
    of jobs makes each step several times as long as another's single chat would find it alone. So
    where a request says by what part its steps may grow, tenants that crowd the engine get no more
    than that of a step: some of their jobs wait, with their KV, and their prompts come in small
    parts. Tenants with a few jobs each are never bound. There are none before the second tenant.

    `begin` makes it for the next step,
    and `charge` takes from it. A job may take more than is left, which later steps pay."""

    def __init__(self, costs: StepCostMeter, block_size: int) -> None:
        self._meter = costs
        self._block_size = block_size
        self._costs = _DEFAULT_COSTS
        self._tenants: dict[str, _Tenant] = {}
        self._returning: dict[str, float] = {}  # who went last, and when; those alone who may bind
        self._seconds_left: dict[str, float] = {}  # by tenant; whoever is not there is not bound
        self._prompt_tokens_left: dict[str, int] = {}  # tokens; of others than those
        self._counted_prefixes: set[int] = set()  # first blocks of shared beginnings that were paid

    @property
    def are_limited(self) -> bool:
        """Whether some tenant is, in this step."""
        return bool(self._seconds_left)

    def enter(self, share: TenantShare, num_jobs: int, most_jobs: int, last_step_at: float) -> None:
        """Add the tenant of all jobs so far. The last of them had a step at `last_step_at`."""
        self._tenants[share.tenant] = _Tenant(
            share.weight, share.step_growth, num_jobs, most_jobs, last_step_at + _LINGER_S
        )

    def add(self, job: Job) -> None:
        """One more open job."""
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
        """Another step is planned. `decoding`: the jobs that generate. None: no tenant is bound."""
        self._seconds_left.clear()
        self._prompt_tokens_left.clear()
        self._remove_inactive(now)
        self._limit_prompts(now)
        if len(self._tenants) >= 2:
            self._limit_crowding_tenants(decoding)
        return self if self._seconds_left or self._prompt_tokens_left else None

    def _limit_crowding_tenants(self, decoding: Iterable[Job]) -> None:
        """Bind the tenants that crowd others."""
        guarded = [(n, t) for n, t in self._tenants.items() if t.step_growth is not None]
        bound = {
            name: [(n, t) for n, t in guarded if n != name and _crowds(tenant, t)]
            for name, tenant in self._tenants.items()
            if guarded and tenant.num_jobs > _CROWD_JOBS * tenant.weight
        }
        if not any(bound.values()):
            return
        self._costs = self._meter.recent() or _DEFAULT_COSTS
        self._counted_prefixes.clear()
        own_s = self._decode_s(decoding, dict(guarded))
        self._counted_prefixes.clear()
        for name, others in bound.items():
            if others:
                tenant = self._tenants[name]
                limit = tenant.weight * min(self._limit_s(t, own_s[n]) for n, t in others)
                tenant.credit_s = min(limit, tenant.credit_s + limit)
                self._seconds_left[name] = tenant.credit_s
                self._prompt_tokens_left.pop(name, None)

    def num_tokens(self, job: Job) -> int:
        """How many of its tokens the step may compute."""
        missing = job.context.num_missing
        left = (
            self._seconds_left.get(job.request.params.share.tenant) if self._seconds_left else None
        )
        if left is None:
            if missing > 1 and self._prompt_tokens_left:
                return min(
                    missing, self._prompt_tokens_left.get(job.request.params.share.tenant, missing)
                )
            return missing
        if left <= 0.0:
            return 0
        return min(missing, max(_MIN_CHUNK_TOKENS, int(left / self._costs.prefill_s)))

    def charge(self, job: Job, num_tokens: int) -> None:
        """The step computes so many of its tokens."""
        name = job.request.params.share.tenant
        if name in self._seconds_left:
            self._seconds_left[name] -= self._cost_s(job, num_tokens)
            self._tenants[name].credit_s = self._seconds_left[name]
        elif job.context.num_missing > 1 and name in self._prompt_tokens_left:
            self._prompt_tokens_left[name] -= num_tokens

    def forgive_debts(self) -> bool:
        """Forgive all debts, since nobody else has anything to compute. False if there are none."""
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
        """Somebody's call may come, who was here, and wait for the step that is under way."""
        away = [name for name, since in self._returning.items() if now < since + _RETURN_S]
        for name, tenant in self._tenants.items() if away else ():
            if tenant.num_jobs > _CROWD_JOBS * tenant.weight and away != [name]:
                self._prompt_tokens_left[name] = _RETURN_PROMPT_TOKENS

    def _limit_s(self, tenant: _Tenant, own_s: float) -> float:
        """The seconds that others of weight 1 may take beside this one, whose outputs take
        `own_s`: no less than it takes itself."""
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
        if context.owned_from:  # what it shares is read once
            if context.block_ids[0] in self._counted_prefixes:
                num_read -= context.owned_from * self._block_size
            self._counted_prefixes.add(context.block_ids[0])
        return costs.sequence_s + num_read * costs.token_s

    def check_integrity(self, jobs: Iterable[Job]) -> None:
        """Recount by the open jobs. Raises AssertionError with what differs."""
        counts = {name: tenant.num_jobs for name, tenant in self._tenants.items()}
        for job in jobs:
            counts[job.request.params.share.tenant] -= 1
        assert not any(counts.values()), counts


def _crowds(tenant: _Tenant, other: _Tenant) -> bool:
    """Whether it has many times as many jobs, by weight, as the other has or had."""
    most = other.num_jobs or other.most_jobs
    return tenant.num_jobs / tenant.weight > max(_CROWD_JOBS, _CROWD_RATIO * most / other.weight)
