"""Requests that read final hidden states, next to other requests."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st

from parrot.protocol.errors import Cancelled
from tests.engine.core.test_overlap import Overlapping
from tests.support.answer import Answer
from tests.support.core_harness import Harness, piece

T = TypeVar("T")
Event = tuple[str, Any, Any, Any]

HARNESSES = pytest.mark.parametrize("make", [Harness, Overlapping])
CHUNKS = st.sampled_from([None, 1, 3, 5])
_TEXTS = st.lists(st.text("abc", min_size=1, max_size=14), min_size=1, max_size=4)
_GENERATE = st.tuples(
    st.just("generate"), st.text("abc", min_size=1, max_size=9), st.integers(1, 6), st.just(0)
)
_ABORT = st.tuples(st.just("abort"), st.integers(1, 8), st.none(), st.none())
_STEPS = st.tuples(st.just("steps"), st.integers(1, 3), st.none(), st.none())


def events(how: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Event]]:
    """Random events. Reads of texts, in the way `how`, are twice as likely as each other event."""
    read = st.tuples(st.just("read"), _TEXTS, how, st.integers(-1, 1))
    return st.lists(st.one_of(read, read, _GENERATE, _ABORT, _STEPS), max_size=14)


def assert_exact(
    harness: Harness,
    happening: Sequence[Event],
    read: Callable[[Sequence[str], Any, int], Answer],
    expected: Callable[[str, Any], T],
    found: Callable[[Answer], list[T]],
) -> None:
    """Check that each finished read returns the expected result, and that no context is left.

    `read` sends a request that reads texts in the way `how`, at a priority."""
    asked: list[tuple[Answer, list[T]]] = []
    for index, (kind, what, how, priority) in enumerate(happening):
        if kind == "read":
            asked.append((read(what, how, priority), [expected(text, how) for text in what]))
        elif kind == "generate":
            harness.generate(piece(index, what), length=how)
        elif kind == "abort":
            harness.core.requests.abort(what)
            harness.deliver()
        else:
            for _ in range(what):
                harness.step()
    harness.run()
    for answer, wanted in asked:
        assert isinstance(answer.error, Cancelled) or found(answer) == wanted
    assert not harness.runner.violations
    assert all(context.context_id >= 0 for context in harness.core._tree)
