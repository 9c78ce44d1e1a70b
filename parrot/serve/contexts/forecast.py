"""What is known of prompts before all of their inputs are: the ready prefixes of waiting
completions.

    template       "Read " {{book}} " and " {{notes}} " and answer: " {{answer}}
    book is ready  |-- ready prefix -----|  missing

A wanted completion waits while an input is missing. Its ready prefix is everything before the first
missing piece, in the order of its prompt; it only grows. Whoever keeps contexts learns from it that
they will be needed; whoever fills contexts can compute it ahead."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from parrot.serve.contexts.next_use import Forecast
from parrot.serve.graph.nodes import Completion, CompletionState
from parrot.serve.graph.variable import VariableState
from parrot.serve.prompts.segments import (
    PrefixHasher,
    Segment,
    extend_key,
    fill_segments,
    preceding_segments,
)


class PrefixListener(Protocol):
    """Hears of ready prefixes, synchronously. `segments` and `keys` (one prefix key for each
    segment) belong to the anticipation: they only grow, and may be read until `dropped`."""

    def ready_prefix_grew(
        self,
        completion: Completion,
        segments: Sequence[Segment],
        keys: Sequence[bytes],
        forecast: Forecast,
    ) -> None:
        """The completion waits, and this much of its prompt is known; more than at the last call,
        or the first that is heard of it. `forecast`: when the rest will be."""
        ...

    def dropped(self, completion: Completion) -> None:
        """It waits no more: it is about to start (then it is QUEUED), or is not wanted any more."""
        ...


class FutureUses(Protocol):
    """The owner of contexts: told which prefixes have a future use."""

    def anticipate(self, keys: Sequence[bytes], forecast: Forecast) -> None:
        """Contexts with the prompts of these keys will be of use when the forecast says. The keys
        of one forecast are distinct."""
        ...

    def forgo(self, keys: Sequence[bytes], forecast: Forecast) -> None:
        """Takes back what was anticipated for this forecast: `keys` are all of them."""
        ...


@dataclass(slots=True, eq=False)
class _Known:
    """What is known of a prompt. `num_own`: pieces of the completion's own fill in it; `end`: its
    key."""

    segments: list[Segment]
    keys: list[bytes]
    end: bytes
    num_own: int = 0

    def grow(self, completion: Completion) -> Sequence[bytes]:
        """Take in what has become ready. Returns the new keys."""
        size = len(self.keys)
        for segment in fill_segments(completion, self.num_own):
            self.end = extend_key(self.end, segment)
            self.segments.append(segment)
            self.keys.append(self.end)
        self.num_own += len(self.keys) - size
        return self.keys[size:]


class Anticipation:
    """Keeps the ready prefix of every waiting completion. `expect` costs what it adds; a completion
    that continues another one that is not done has no prefix apart from that one's, so a long chain
    that waits costs nothing."""

    def __init__(self, hasher: PrefixHasher, uses: FutureUses) -> None:
        self._hasher = hasher
        self._uses = uses
        self._listener: PrefixListener | None = None
        self._waiting: dict[Completion, tuple[_Known, Forecast]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def listen(self, listener: PrefixListener) -> None:
        """At most one, before the first completion."""
        assert self._listener is None, self._listener
        self._listener = listener

    def expect(self, completion: Completion, forecast: Forecast) -> None:
        """A wanted completion waits, and its prefix may have grown. `forecast`: when its inputs
        will be there; that of the first call holds."""
        waiting = self._waiting.get(completion)
        if waiting is not None:
            known, forecast = waiting
            new = known.grow(completion)
        elif _is_begun(completion):
            known = self._begin(completion)
            known.grow(completion)
            self._waiting[completion] = (known, forecast)
            new = known.keys
        else:
            return
        self._uses.anticipate(new, forecast)
        if new and self._listener is not None:
            self._listener.ready_prefix_grew(completion, known.segments, known.keys, forecast)

    def drop(self, completion: Completion) -> None:
        """It waits no more. Safe in any state."""
        waiting = self._waiting.pop(completion, None)
        if waiting is None:
            return
        known, forecast = waiting
        self._uses.forgo(known.keys, forecast)
        if known.keys and self._listener is not None:
            self._listener.dropped(completion)

    def prompt(self, completion: Completion) -> tuple[list[Segment], tuple[bytes, ...]]:
        """The segments and keys of the whole prompt. Its inputs are ready now; it waits no more."""
        waiting = self._waiting.get(completion)
        if waiting is None:
            whole = self._begin(completion)
        else:
            known = waiting[0]
            whole = replace(known, segments=[*known.segments], keys=[*known.keys])
            self.drop(completion)
        whole.grow(completion)
        return whole.segments, tuple(whole.keys)

    def check_integrity(self) -> Counter[bytes]:
        """Recount. Returns how often each key is anticipated; raises AssertionError with what
        differs."""
        counts: Counter[bytes] = Counter()
        for completion, (known, forecast) in self._waiting.items():
            assert completion.state is CompletionState.WAITING, completion
            fresh = self._begin(completion)
            fresh.grow(completion)
            assert fresh.segments == known.segments, (completion, known)
            assert fresh.keys == known.keys, (completion, known)
            assert forecast() >= 0, completion
            counts.update(known.keys)
        return counts

    def _begin(self, completion: Completion) -> _Known:
        options = completion.options
        segments = preceding_segments(completion)
        keys = list(self._hasher.keys(options.tenant, options.chat, segments))
        end = keys[-1] if keys else self._hasher.root(options.tenant, options.chat)
        return _Known(segments, keys, end)


def _is_begun(completion: Completion) -> bool:
    before = completion.previous
    return before is None or before.output.state is VariableState.READY
