"""The shares of an engine's tenants: whose KV goes first when its memory is full, and how much of a
step the jobs of each may take.

A share group is all whose requests have one salt: a tenant, or several that share what is cached.
Each has a part of the memory by its weight, beside the others that are here. Whoever has most by
weight loses first, the oldest first. What contexts hold within half of their group's part is not
taken for another's sake as long as there is anybody else to give way or to wait for: so there is
always memory for half of what could run. Who has not been here for a while has no part any more,
and loses before all others. With one group there is only its own order.

    held by contexts   | in use | idle: goes in this order . . . |    num_used
    held by nobody     | published, till the block is given away |    num_kept, of both tiers
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil, inf
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from parrot.engine.core.steps import StepCostMeter
from parrot.protocol.engine_api import StepCosts
from parrot.utils.clock import Clock, MonotonicClock
from parrot.utils.heaps import LazyHeap

if TYPE_CHECKING:
    from parrot.engine.core.jobs import Job

_PRESENT_S = 120.0  # a group that was here so lately has a part; as in ServeCore's ledger
_PROTECTED = 0.5  # of each part; the rest is for whatever runs
_MAX_TENANTS = 1024  # of one group, whose weights are added
_ROUNDED = 1e-6  # of a weight that is taken away
_RUN_PART = 1 / 1024  # of all blocks: so many go at once, though it may be another's turn

T = TypeVar("T")


_CROWD = 16  # jobs by weight: a tenant with fewer crowds nobody
_TIMES = 4  # a tenant crowds another when it has this many times its jobs by weight
_LINGER_S = 10.0  # a tenant that left so lately may come back for its next turn
_LINGER_GROWTH = 3.0  # steps may grow by this many times what they may beside a tenant that stays
_AWAY_S = 600.0  # a tenant that left is remembered for so long
_AWAY_TOKENS = 1024  # of a crowd's prompts in a step while one is remembered: a tenth dearer
_NUM_AWAY = 2  # tenants that are remembered so: the crowd itself may be one
_MIN_CHUNK = 32  # tokens of a prompt; what they take too much is paid by later steps
_LEAST_S = 1e-6  # so that something may be computed where nobody else has anything
_USUAL_COSTS = StepCosts()


@dataclass(slots=True, eq=False)
class ShareGroup:
    """A group with contexts or KV. Its weight is the sum of those of its tenants, which have been
    here since it was last away. `num_used` blocks are held by contexts, and `num_kept` blocks and
    slots of the host by nobody. A block counts for the group for which it was computed, also while
    others share it."""

    salt: str
    weight: float = 1.0
    weights: dict[str, float] = field(default_factory=dict)
    seen: float = 0.0
    is_away: bool = False
    num_contexts: int = 0
    num_used: int = 0
    num_kept: int = 0


Amount = Callable[[ShareGroup], int]


class KvShares:
    """The groups of one engine, whose device has `num_blocks`."""

    def __init__(self, num_blocks: int, clock: Clock | None = None) -> None:
        self._num_blocks = num_blocks
        self.run_slack = int(num_blocks * _RUN_PART)
        self._clock = clock or MonotonicClock()
        self._groups: dict[str, ShareGroup] = {}
        self._here: OrderedDict[ShareGroup, None] = OrderedDict()  # not away, by `seen`
        self._weight = 0.0  # of those
        self._lines: list[Callable[[ShareGroup], None]] = []
        self.num_changes = 0
        """Rises when other KV may go than before."""

    def group(self, salt: str) -> ShareGroup:
        """The group of a salt, which is here from now on."""
        group = self._groups.get(salt)
        if group is None:
            group = self._groups[salt] = ShareGroup(salt, is_away=True)
            for known in self._groups.values() if len(self._groups) == 2 else ():
                self.grew(known)
        self.touch(group)
        return group

    def came(self, group: ShareGroup, tenant: str, weight: float) -> None:
        """A request of one of its tenants has come."""
        self.touch(group)
        if group.weights.get(tenant) == weight:
            return
        if tenant in group.weights or len(group.weights) < _MAX_TENANTS:
            group.weights[tenant] = weight
            before, group.weight = group.weight, sum(group.weights.values())
            self._add_weight(group.weight - before)
            self.grew(group)

    def touch(self, group: ShareGroup) -> None:
        """It is here now."""
        group.seen = self._clock.now()
        if group.is_away:
            group.is_away = False
            self._here[group] = None
            self._add_weight(group.weight)
            self.num_changes += 1
        else:
            self._here.move_to_end(group)

    def grew(self, group: ShareGroup) -> None:
        """It has more KV, or less weight. (The lines find out themselves about the contrary.)"""
        if self.has_several:
            self.num_changes += 1
            for changed in self._lines:
                changed(group)

    def having(self, group: ShareGroup | None) -> ShareGroup:
        """The group, which may have been forgotten, with one kept block more; None: of no salt."""
        salt = "" if group is None else group.salt
        known = self._groups.get(salt) or self.group(salt)
        known.num_kept += 1
        self.grew(known)
        return known

    def kept_less(self, group: ShareGroup) -> None:
        """One kept block less."""
        group.num_kept -= 1
        self.forget_if_gone(group)

    def forget_if_gone(self, group: ShareGroup) -> None:
        """Forget it if it has neither contexts nor KV."""
        if not (group.num_contexts or group.num_used or group.num_kept):
            del self._groups[group.salt]
            if not group.is_away:
                self._leave(group)

    def sweep(self) -> None:
        """Find out who is away by now."""
        end = self._clock.now() - _PRESENT_S
        while self._here and (group := next(iter(self._here))).seen <= end:
            group.is_away = True
            group.weights.clear()
            self._leave(group)
            self.grew(group)

    def _leave(self, group: ShareGroup) -> None:
        del self._here[group]
        self._add_weight(-group.weight)

    def _add_weight(self, change: float) -> None:
        """A group of those that are here has more weight or less, or another one is here or not."""
        self._weight += change
        if self._weight < -change * _ROUNDED:  # what is left may be nothing but rounding
            self._weight = sum(group.weight for group in self._here)

    @property
    def has_several(self) -> bool:
        """Whether there is an order between groups."""
        return len(self._groups) > 1

    @property
    def protected(self) -> float:
        """Blocks of the device that are protected for a weight of 1; 0 for a group alone."""
        return _PROTECTED * self._num_blocks / self._weight if len(self._here) > 1 else 0.0

    def protects(self, group: ShareGroup) -> bool:
        """Whether its contexts hold no more than what is protected."""
        self.sweep()
        most = self.protected * group.weight
        return most > 0.0 and not group.is_away and group.num_used <= most

    def add_line(self, changed: Callable[[ShareGroup], None]) -> None:
        """`changed` is called with each group that grew or went away."""
        self._lines.append(changed)

    def check_integrity(self, counts: Mapping[ShareGroup, tuple[int, int, int]]) -> None:
        """`counts`: of each group, its contexts, and what it uses and keeps. Raises AssertionError
        with what differs."""
        groups = {group: _counted(group) for group in self._groups.values()}
        assert groups == {g: count for g, count in counts.items() if any(count)}, (groups, counts)
        assert set(self._here) == {group for group in groups if not group.is_away}, self._here
        weight = sum(group.weight for group in self._here)
        assert abs(self._weight - weight) <= 1e-6 * max(1.0, weight), (self._weight, weight)
        seen = [group.seen for group in self._here]
        assert seen == sorted(seen), seen


def _counted(group: ShareGroup) -> tuple[int, int, int]:
    return group.num_contexts, group.num_used, group.num_kept


class FairLine(Generic[T]):
    """Things that may go, each group's in an order of its own. First goes the first of the group
    with the largest `amount` by weight; before all, those of groups that are away. A step is
    O(log n) of the groups."""

    def __init__(self, shares: KvShares, amount: Amount) -> None:
        self._shares = shares
        self._amount = amount
        self._items: dict[ShareGroup, OrderedDict[T, None]] = {}
        self._groups: LazyHeap[ShareGroup, tuple[float, ...]] = LazyHeap()
        self._num_items = 0
        shares.add_line(self._changed)

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[T]:
        """Yield all, group by group as these are now."""
        for group in self.groups():
            yield from self._items[group]

    def groups(self) -> list[ShareGroup]:
        """Those with something in line, in order."""
        return sorted(self._items, key=self._key)

    def has(self, group: ShareGroup, item: T) -> bool:
        return item in self._items.get(group, ())

    def of(self, group: ShareGroup) -> Collection[T]:
        """Its part of the line, in order."""
        return self._items.get(group, {}).keys()

    def add(self, group: ShareGroup, item: T, *, goes_first: bool = False) -> None:
        """It is the last of its group to go, or the first; also if it was in line."""
        items = self._items.get(group)
        if items is None:
            items = self._items[group] = OrderedDict()
            self._groups.set(group, self._key(group))
        elif item in items:
            self._num_items -= 1
            del items[item]
        self._num_items += 1
        items[item] = None
        if goes_first:
            items.move_to_end(item, last=False)

    def add_run(self, group: ShareGroup, items: Sequence[T]) -> None:
        """`add` these, of which none is in line."""
        self.add(group, items[0])
        line = self._items[group]
        for item in items[1:]:
            line[item] = None
        self._num_items += len(items) - 1

    def discard(self, group: ShareGroup, item: T) -> None:
        """It leaves the line, if it is in it."""
        items = self._items.get(group)
        if items is None or item not in items:
            return
        del items[item]
        self._num_items -= 1
        if not items:
            del self._items[group]
            self._groups.discard(group)

    def first(self) -> T | None:
        group = self.first_group()
        return None if group is None else next(iter(self._items[group]))

    def first_group(self) -> ShareGroup | None:
        """Whose turn it is to lose something."""
        if len(self._items) == 1 == len(self._groups):
            return next(iter(self._items))
        self._shares.sweep()
        while (top := self._groups.top()) is not None:
            (before, group), key = top, self._key(top[1])
            if before == key or self._groups.is_before_others(key):
                return group
            self._groups.set(group, key)  # it has less than it had
        return None

    def surplus(self, group: ShareGroup) -> int | None:
        """How much the group, whose turn it is, loses before it is another's turn or it is
        protected; None: all that it has."""
        level = self._shares.protected
        return self._above(group, level) if level and not group.is_away else None

    def _above(self, group: ShareGroup, level: float) -> int:
        """How much the group, whose turn it is, has above a level and the next group's."""
        self._groups.discard(group)
        other = self.first_group()
        self._groups.set(group, self._key(group))
        if other is not None:
            level = max(level, self._amount(other) / other.weight)
        return max(1, ceil(self._amount(group) - level * group.weight))

    def first_run(self, most: int) -> Sequence[T]:
        """Return at most so many that go next, of one group: till it is another's turn, or a few
        more."""
        group = self.first_group()
        if group is None:
            return ()
        if most > 1 and len(self._groups) > 1 and not group.is_away:
            most = min(most, self._above(group, 0.0) + self._shares.run_slack)
        return list(islice(self._items[group], most))

    def discard_run(self, group: ShareGroup, items: Sequence[T]) -> None:
        """These, which are in line, leave it."""
        for item in items[1:]:
            del self._items[group][item]
        self._num_items -= len(items) - 1
        self.discard(group, items[0])

    def pass_over(self, group: ShareGroup) -> None:
        """It is nobody's turn but others', till `restore`."""
        self._groups.discard(group)

    def restore(self, groups: Collection[ShareGroup]) -> None:
        """It may be the turn of these again."""
        for group in groups:
            if group in self._items:
                self._groups.set(group, self._key(group))

    def _changed(self, group: ShareGroup) -> None:
        if group in self._groups and (key := self._key(group)) < self._groups.key(group):
            self._groups.set(group, key)  # else `first_group` finds out

    def _key(self, group: ShareGroup) -> tuple[float, ...]:
        if group.is_away:
            return (0.0, group.seen)
        return (1.0, -self._amount(group) / group.weight)

    def check_integrity(self) -> None:
        assert set(self._groups) == set(self._items), (self._groups, self._items)
        assert self._num_items == sum(map(len, self._items.values())), self._num_items
        for group in self._items if self._shares.has_several else ():
            assert self._groups.key(group) <= self._key(group), f"{group} has grown unnoticed"


def num_used(group: ShareGroup) -> int:
    """Blocks of the device that its contexts hold."""
    return group.num_used


def num_held(group: ShareGroup) -> int:
    """Blocks that there are of it, and slots of the host."""
    return group.num_used + group.num_kept


class TenantShare(NamedTuple):
    """The tenant of a request, and by what part tenants of the same weight that crowd the engine
    may lengthen its steps; None: by any."""

    tenant: str = ""
    weight: float = 1.0
    step_growth: float | None = None


ALONE = TenantShare()


@dataclass(slots=True)
class _Tenant:
    """`num_jobs` are open; `most_jobs` were, since it came. It is remembered `until` some time
    after the last step with a job. `credit_s`: what its jobs may take of the next step."""

    weight: float = 1.0
    step_growth: float | None = None
    num_jobs: int = 0
    most_jobs: int = 0
    until: float = -inf
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
        self._costs = _USUAL_COSTS
        self._tenants: dict[str, _Tenant] = {}
        self._away: dict[str, float] = {}  # who went last, and when; those alone who may bind
        self._left: dict[str, float] = {}  # by tenant; whoever is not there is not bound
        self._prompt_left: dict[str, int] = {}  # tokens; of others than those
        self._read: set[int] = set()  # first blocks of shared beginnings that were paid

    @property
    def are_bound(self) -> bool:
        """Whether some tenant is, in this step."""
        return bool(self._left)

    def was_here(self, first: TenantShare, num_jobs: int, most_jobs: int, until: float) -> None:
        """Enter the tenant whom all jobs were of till now, the last of them at this time."""
        self._tenants[first.tenant] = _Tenant(
            first.weight, first.step_growth, num_jobs, most_jobs, until + _LINGER_S
        )

    def add(self, job: "Job") -> None:
        """One more open job."""
        share = job.request.wanted.share
        tenant = self._tenants.get(share.tenant)
        if tenant is None:
            tenant = self._tenants[share.tenant] = _Tenant()
            self._away.pop(share.tenant, None)
        tenant.weight = share.weight
        tenant.num_jobs += 1
        tenant.most_jobs = max(tenant.most_jobs, tenant.num_jobs)
        if share.step_growth is not None:
            tenant.step_growth = share.step_growth

    def remove(self, job: "Job") -> None:
        self._tenants[job.request.wanted.share.tenant].num_jobs -= 1

    def begin(self, now: float, decoding: Iterable["Job"]) -> None:
        """Another step is planned. `decoding`: the jobs that generate."""
        self._left.clear()
        self._prompt_left.clear()
        self._forget(now)
        self._bind_prompts(now)
        if len(self._tenants) < 2:
            return
        guarded = [(n, t) for n, t in self._tenants.items() if t.step_growth is not None]
        bound = {
            name: [(n, t) for n, t in guarded if n != name and _crowds(tenant, t)]
            for name, tenant in self._tenants.items()
            if guarded and tenant.num_jobs > _CROWD * tenant.weight
        }
        if not any(bound.values()):
            return
        self._costs = self._meter.recent() or _USUAL_COSTS
        self._read.clear()
        own_s = self._decode_s(decoding, dict(guarded))
        self._read.clear()
        for name, others in bound.items():
            if others:
                tenant = self._tenants[name]
                limit = tenant.weight * min(self._allowed_s(t, own_s[n]) for n, t in others)
                tenant.credit_s = min(limit, tenant.credit_s + limit)
                self._left[name] = tenant.credit_s
                self._prompt_left.pop(name, None)

    def num_tokens(self, job: "Job") -> int:
        """How many of its tokens the step may compute."""
        missing = job.context.num_missing
        left = self._left.get(job.request.wanted.share.tenant) if self._left else None
        if left is None:
            if missing > 1 and self._prompt_left:
                return min(missing, self._prompt_left.get(job.request.wanted.share.tenant, missing))
            return missing
        if left <= 0.0:
            return 0
        return min(missing, max(_MIN_CHUNK, int(left / self._costs.prefill_s)))

    def charge(self, job: "Job", num_tokens: int) -> None:
        """The step computes so many of its tokens."""
        name = job.request.wanted.share.tenant
        if name in self._left:
            self._left[name] -= self._cost_s(job, num_tokens)
            self._tenants[name].credit_s = self._left[name]
        elif job.context.num_missing > 1 and name in self._prompt_left:
            self._prompt_left[name] -= num_tokens

    def lift(self) -> bool:
        """Forgive all debts, since nobody else has anything to compute. False if there are none."""
        for name in self._left:
            self._tenants[name].credit_s = inf
        return bool(self._left)

    def _forget(self, now: float) -> None:
        for name, tenant in list(self._tenants.items()):
            if tenant.num_jobs:
                tenant.until = now + _LINGER_S
            elif tenant.step_growth is None or now >= tenant.until:
                del self._tenants[name]
                if tenant.step_growth is not None:
                    self._away[name] = now
                    if len(self._away) > _NUM_AWAY:
                        del self._away[next(iter(self._away))]

    def _bind_prompts(self, now: float) -> None:
        """Somebody's call may come, who was here, and wait for the step that is under way."""
        away = [name for name, since in self._away.items() if now < since + _AWAY_S]
        for name, tenant in self._tenants.items() if away else ():
            if tenant.num_jobs > _CROWD * tenant.weight and away != [name]:
                self._prompt_left[name] = _AWAY_TOKENS

    def _allowed_s(self, tenant: _Tenant, own_s: float) -> float:
        """The seconds that others of weight 1 may take beside this one, whose outputs take
        `own_s`: no less than it takes itself."""
        assert tenant.step_growth is not None, tenant
        growth = tenant.step_growth * (1.0 if tenant.num_jobs else _LINGER_GROWTH)
        return max(_LEAST_S, own_s, growth * (self._costs.step_s + own_s)) / tenant.weight

    def _decode_s(self, decoding: Iterable["Job"], tenants: dict[str, _Tenant]) -> dict[str, float]:
        own_s = dict.fromkeys(tenants, 0.0)
        for job in decoding:
            if (name := job.request.wanted.share.tenant) in own_s:
                own_s[name] += self._cost_s(job, 1)
        return own_s

    def _cost_s(self, job: "Job", num_tokens: int) -> float:
        costs, context = self._costs, job.context
        if num_tokens > 1:
            return num_tokens * costs.prefill_s
        num_read = len(context.token_ids)
        if context.owned_from:  # what it shares is read once
            if context.block_ids[0] in self._read:
                num_read -= context.owned_from * self._block_size
            self._read.add(context.block_ids[0])
        return costs.sequence_s + num_read * costs.token_s

    def check_integrity(self, jobs: Iterable["Job"]) -> None:
        """Recount by the open jobs. Raises AssertionError with what differs."""
        counts = {name: tenant.num_jobs for name, tenant in self._tenants.items()}
        for job in jobs:
            counts[job.request.wanted.share.tenant] -= 1
        assert not any(counts.values()), counts


def _crowds(tenant: _Tenant, other: _Tenant) -> bool:
    """Whether it has many times as many jobs, by weight, as the other has or had."""
    most = other.num_jobs or other.most_jobs
    return tenant.num_jobs / tenant.weight > max(_CROWD, _TIMES * most / other.weight)
