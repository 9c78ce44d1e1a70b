"""Forecasts of the uses that contexts will have: who is going to use them, and when.

    template       "Read " {{book}} " and " {{notes}} " and answer: " {{answer}}
    book is ready  |-- ready prefix -----|  missing

A wanted completion waits while an input is missing. Its *ready prefix* is everything before the
first missing piece, in the order of its prompt; it only grows. Whoever keeps contexts learns from
it that they will be needed; whoever fills contexts can compute it ahead.

The next use of a context is predicted in seconds. Each reason why somebody may use it has a rate:
one over the seconds until it is expected to come true. The rates add up; the next use is expected
after one over their sum.

    queued runs                 now
    completions that wait       when their inputs are predicted to be there
    the session's next call     the rest of the usual think time (see `ThinkTimes`)
    reuse so far                the mean time between uses, or the time since the last if longer
    anybody else                in a while, the later the longer nobody came"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from parrot.serve.contexts.index import Boundary, Context
from parrot.serve.contexts.think_time import ThinkTimes
from parrot.serve.graph.nodes import Completion, CompletionState
from parrot.serve.graph.variable import VariableState
from parrot.serve.prompts.segments import (
    PrefixHasher,
    PrefixLink,
    Segment,
    extend_key,
    fill_segments,
    link_of,
    merged,
    preceding,
)

Forecast = Callable[[], float]
"""When a completion that waits will have its inputs, on the clock's scale; infinite if nobody
knows."""

GROUPED = 16  # links
_SOON_S = 0.5  # what is due or overdue is expected within this
_OPEN_END_S = 60.0  # what waits for the program itself, of which nothing is known
_UNUSED_S = 600.0  # a context that nobody is known to want


@dataclass(slots=True)
class _Expectation:
    """Who will use a prefix. Of `waiting`, the first to wait comes first."""

    num_queued: int = 0
    waiting: dict[Forecast, None] = field(default_factory=dict)


class Expectations:
    """The prefix keys that queued and waiting completions will use, and when."""

    def __init__(self) -> None:
        self._expected: defaultdict[bytes, _Expectation] = defaultdict(_Expectation)

    def add_queued(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._expected[key].num_queued += 1

    def remove_queued(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._expected[key].num_queued -= 1
            self._tidy(key)

    def add_waiting(self, keys: Iterable[bytes], forecast: Forecast) -> None:
        for key in keys:
            self._expected[key].waiting[forecast] = None

    def remove_waiting(self, keys: Iterable[bytes], forecast: Forecast) -> None:
        for key in keys:
            self._expected[key].waiting.pop(forecast)
            self._tidy(key)

    def soonest(self, boundaries: Iterable[Boundary], now: float) -> float | None:
        """When the first of them is used; None if none is expected to be."""
        soonest = None
        for boundary in boundaries:
            expectation = self._expected.get(boundary.key)
            if expectation is not None:
                when = now if expectation.num_queued else next(iter(expectation.waiting))()
                soonest = when if soonest is None else min(soonest, when)
        return soonest

    def check_integrity(self, counts: Mapping[bytes, int]) -> None:
        """`counts`: how many completions, queued or waiting, would use each key."""
        own = {key: e.num_queued + len(e.waiting) for key, e in self._expected.items()}
        assert own == counts, (own, counts)

    def _tidy(self, key: bytes) -> None:
        expectation = self._expected[key]
        if not expectation.num_queued and not expectation.waiting:
            del self._expected[key]


def next_use(
    expectations: Expectations, think_times: ThinkTimes, context: Context, now: float
) -> float:
    """When the context is expected to be used, on the clock's scale, by what is expected and what
    was learnt."""
    idle_s = now - context.last_used
    rate = 1 / (_UNUSED_S + idle_s)
    when = expectations.soonest(context.boundaries, now)
    if when is not None:
        rate += 1 / min(max(when - now, _SOON_S), _OPEN_END_S)
    num_forks = context.num_forks
    if context.awaiting is not None:
        source, since = context.awaiting
        rate += 1 / max(think_times.expected_s(source, now - since), _SOON_S)
        num_forks -= 1  # the session's own next call
    if num_forks > 0:
        between_s = (context.last_used - context.opened_at) / num_forks
        rate += 1 / max(between_s, idle_s, _SOON_S)
    return now + 1 / rate


@dataclass(slots=True, eq=False)
class ReadyPrefix:
    """The known beginning of a prompt, with one prefix key for each segment. It only grows.
    `forecast`: when the rest will be there. `num_own`: pieces of the completion's own fill in it;
    `end`: its key."""

    segments: list[Segment]
    keys: list[bytes]
    end: bytes
    forecast: Forecast
    num_own: int = 0

    def grow(self, completion: Completion) -> None:
        """Take in what has become ready."""
        for segment in fill_segments(completion, self.num_own):
            self.end = extend_key(self.end, segment)
            self.segments.append(segment)
            self.keys.append(self.end)
            self.num_own += 1


class ReadyPrefixes:
    """Keeps the ready prefix of every waiting completion. `expect` costs what it adds; a completion
    that continues another one that is not done has no prefix apart from that one's, so a long chain
    that waits costs nothing."""

    def __init__(self, expectations: Expectations, hasher: PrefixHasher | None = None) -> None:
        self._hasher = hasher or PrefixHasher()
        self._expectations = expectations
        self._waiting: dict[Completion, ReadyPrefix] = {}
        self._links: WeakKeyDictionary[Completion, PrefixLink] = WeakKeyDictionary()
        self._groups: WeakKeyDictionary[Completion, PrefixLink] = (
            WeakKeyDictionary()
        )  # by their last

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, completion: Completion, forecast: Forecast) -> ReadyPrefix | None:
        """A wanted completion waits; `forecast`: when its inputs will be there (that of the first
        call holds). Returns its prefix if that has grown since the last call."""
        prefix, num_known = self._waiting.get(completion), 0
        if prefix is not None:
            num_known = len(prefix.keys)
        elif _is_begun(completion):
            prefix = self._waiting[completion] = self._begin(completion, forecast)
        else:
            return None
        prefix.grow(completion)
        if len(prefix.keys) == num_known:
            return None
        self._expectations.add_waiting(prefix.keys[num_known:], prefix.forecast)
        return prefix

    def drop(self, completion: Completion) -> ReadyPrefix | None:
        """It waits no more. Returns the prefix that it had, if any. Safe in any state."""
        prefix = self._waiting.pop(completion, None)
        if prefix is not None:
            self._expectations.remove_waiting(prefix.keys, prefix.forecast)
        return prefix

    def prompt(self, completion: Completion) -> tuple[list[Segment], tuple[bytes, ...]]:
        """The segments and keys of the whole prompt. Its inputs are ready now; it waits no more."""
        whole = self.drop(completion) or self._begin(completion, _at_once)
        whole.grow(completion)
        return whole.segments, tuple(whole.keys)

    def check_integrity(self) -> Counter[bytes]:
        """Recount. Returns how often each key is expected; raises AssertionError with what
        differs."""
        counts: Counter[bytes] = Counter()
        for completion, prefix in self._waiting.items():
            assert completion.state is CompletionState.WAITING, completion
            fresh = self._begin(completion, prefix.forecast)
            fresh.grow(completion)
            if not _is_late(completion):
                assert fresh.segments == prefix.segments, (completion, prefix)
                assert fresh.keys == prefix.keys, (completion, prefix)
            assert prefix.forecast() >= 0, completion
            counts.update(prefix.keys)
        return counts

    def _begin(self, completion: Completion, forecast: Forecast) -> ReadyPrefix:
        options = completion.options
        end = self._hasher.root(options.cache_salt, options.chat)
        segments: list[Segment] = []
        keys: list[bytes] = []
        for link in self._chain(preceding(completion), end, may_group=not options.chat):
            segments += link.segments
            keys += link.keys
        return ReadyPrefix(segments, keys, keys[-1] if keys else end, forecast)

    def _chain(
        self, completions: Sequence[Completion], end: bytes, *, may_group: bool
    ) -> Iterator[PrefixLink]:
        """The links behind the prefix key `end`, with the old ones of a long conversation in
        groups: hundreds would be looked at for each of its turns. A chat's segments have markup
        between them, so they cannot be one."""
        at = 0
        while at < len(completions):
            stop = at + 1
            if may_group and at % GROUPED == 1 and at + 2 * GROUPED <= len(completions):
                stop = at + GROUPED
            link = self._link(completions[at:stop], end)
            yield link
            at, end = stop, link.keys[-1]

    def _link(self, completions: Sequence[Completion], end: bytes) -> PrefixLink:
        """One link, or a group of them as one."""
        is_group = len(completions) > 1
        known = self._groups if is_group else self._links
        link = known.get(completions[-1])
        if link is None:
            if is_group:
                links: list[PrefixLink] = []
                for completion in completions:
                    links.append(self._link([completion], links[-1].keys[-1] if links else end))
                link = merged(links)
            else:
                link = link_of(completions[0], end)
            known[completions[-1]] = link
        return link


def _is_late(completion: Completion) -> bool:
    """Whether it has yet to hear of an input that is settled."""
    return completion.missing > sum(not variable.is_settled for variable in completion.inputs)


def _at_once() -> float:
    return 0.0


def _is_begun(completion: Completion) -> bool:
    before = completion.previous
    return before is None or before.output.state is VariableState.READY
