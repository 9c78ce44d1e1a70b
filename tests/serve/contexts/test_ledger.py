"""The context ledger, by examples."""

from collections import Counter

import pytest

from parrot.serve.contexts.index import Boundary, FreeReason, LedgerContext, Source
from tests.serve.contexts.ledger_book import Book

SOURCE = Source("acme", "f")


@pytest.fixture(params=["next_use", "lru"])
def any_book(request: pytest.FixtureRequest) -> Book:
    book = Book(eviction=request.param)
    book.add_engine(7, 100)
    return book


@pytest.fixture
def book() -> Book:
    book = Book()
    book.add_engine(7, 100)
    return book


def freed(book: Book) -> list[int]:
    return book.take_frees().get(7, [])


def test_the_longest_match_wins(book: Book) -> None:
    a = book.add("a", 10)
    ab = book.add("ab", 5, a)
    keys = [b"a", b"ab", b"abc"]
    match = book.index.match(7, keys)
    assert match is not None
    assert (match.num_covered, match.context, match.boundary.length) == (2, ab, 15)
    assert book.index.match(7, [b"a", b"x"]) == (1, a, Boundary(b"a", 10, 0))
    assert book.index.match(7, [b"x"]) is None
    assert book.index.match(8, keys) is None
    assert [bool(book.index.holders(key)) for key in keys] == [True, True, False]
    assert list(book.index.holders(b"ab") or ()) == [7]
    assert book.index.holders(b"abc") is None


def test_shared_tokens_count_once(book: Book) -> None:
    root = book.add("r", 40)
    for i in range(5):
        book.add(f"r{i}", 5, root)
    assert book.usage(7)[1] == 65
    assert book.usage(7)[0] == 6


def test_sizes_are_in_blocks() -> None:
    book = Book()
    book.add_engine(7, 1000, block_size=16)
    root = book.add("r", 20)
    assert book.usage(7)[1] == 32
    book.add("s", 1, root)  # The fork is inside the second block, so this block is copied.
    assert book.usage(7)[1] == 48
    book.add("t", 1, root, at=16)
    assert book.usage(7)[1] == 64


def test_the_least_recently_used_context_is_evicted_first(any_book: Book) -> None:
    contexts = [any_book.add(str(i), 30) for i in range(3)]
    any_book.add("new", 30)
    assert any_book.evict_to_capacity(7)
    assert freed(any_book) == [contexts[0].id]
    assert any_book.notices == 1
    any_book.pin(contexts[1])
    any_book.unpin(contexts[1])  # It is now the most recently used one.
    any_book.add("newer", 30)
    assert any_book.evict_to_capacity(7)
    assert freed(any_book) == [contexts[2].id]
    any_book.check_integrity({}, Counter())


def test_expected_contexts_are_evicted_last(book: Book) -> None:
    wanted, other = book.add("wanted", 40), book.add("other", 40)
    book.expectations.add_queued([b"wanted"])
    book.expectations.add_queued([b"wanted"])
    book.expectations.remove_queued([b"wanted"])
    book.add("new", 40)
    assert book.evict_to_capacity(7)
    assert freed(book) == [other.id]
    book.expectations.remove_queued([b"wanted"])
    book.later(1)
    book.add("newer", 40)
    assert book.evict_to_capacity(7)
    assert freed(book) == [wanted.id]


def test_a_context_in_use_is_never_evicted(any_book: Book) -> None:
    root = any_book.add("r", 60)
    leaf = any_book.add("l", 30, root)
    any_book.pin(leaf)
    big = any_book.add("big", 50)
    any_book.pin(big)
    assert not any_book.evict_to_capacity(7)
    assert freed(any_book) == []
    any_book.check_integrity({leaf.id: 1, big.id: 1}, Counter())
    any_book.unpin(leaf)
    assert any_book.evict_to_capacity(7)
    assert freed(any_book) == [leaf.id, root.id]


def test_finishing_keeps_the_output_and_frees_the_reserve(book: Book) -> None:
    context = book.add("p", 10, reserved=50)
    book.pin(context)
    assert book.usage(7)[1] == 60
    book.finish_generation(context, 25, Boundary(b"po", 24, 9), SOURCE)
    book.unpin(context)
    assert book.usage(7)[1] == 25
    assert book.index.match(7, [b"p", b"po"]) == (2, context, Boundary(b"po", 24, 9))


def test_a_computed_context_has_computed_ancestors(book: Book) -> None:
    root = book.add("r", 10)
    leaf = book.add("l", 10, root)
    other = book.add("o", 10, root)
    leaf.mark_computed()
    assert (root.is_computed, leaf.is_computed, other.is_computed) == (True, True, False)


def test_a_retired_context_is_not_found_and_its_forks_stay(book: Book) -> None:
    top = book.add("top", 5, owner="acme")
    root = book.add("r", 10, top)
    used, idle = book.add("u", 10, root), book.add("i", 10, root)
    book.pin(used)
    book.retire(root)
    assert book.index.match(7, [b"top", b"r"]) == (1, top, Boundary(b"top", 5, 0))
    assert book.index.match(7, [b"r", b"u"]) == (2, used, Boundary(b"u", 25, 0))
    book.check_integrity({used.id: 1}, Counter())
    book.retire(idle)
    assert freed(book) == [idle.id]
    book.retire(used)
    assert freed(book) == []
    book.unpin(used)
    assert freed(book) == [used.id, root.id]
    book.check_integrity({}, Counter())
    assert book.usage(7)[1] == 5


def test_a_released_context_with_forks_stays(book: Book) -> None:
    """A prefetch was cancelled, but another call already continues its context."""
    root, alone = book.add("r", 10), book.add("a", 10)
    book.add("l", 10, root).mark_computed()
    alone.mark_computed()
    book.release(root)
    assert freed(book) == []
    assert book.index.match(7, [b"r"]) == (1, root, Boundary(b"r", 10, 0))
    book.release(alone)
    assert freed(book) == [alone.id]


def test_a_context_is_retired_with_its_ancestors_but_not_their_other_forks(book: Book) -> None:
    root = book.add("r", 10, owner="acme")
    lost, other = book.add("l", 10, root), book.add("o", 10, root)
    book.pin(lost)
    book.retire(lost, with_ancestors=True)
    book.unpin(lost)
    assert freed(book) == [lost.id]
    assert book.index.match(7, [b"r"]) is None
    assert book.index.match(7, [b"o"]) == (1, other, Boundary(b"o", 20, 0))
    book.retire(other)
    assert freed(book) == [other.id, root.id]


def test_an_ended_session_frees_its_contexts_except_those_in_use(book: Book) -> None:
    constant = book.add("c", 10, owner="acme")
    idle, busy = book.add("i", 10, constant), book.add("b", 10, constant)
    other = book.add("o", 5, idle, owner=2)  # Another session continues the context.
    book.pin(busy)
    list(book.release_session(1))
    assert freed(book) == []
    assert book.index.match(7, [b"c", b"i"]) == (1, constant, Boundary(b"c", 10, 0))
    book.check_integrity({busy.id: 1}, Counter())
    book.unpin(busy)
    assert freed(book) == [busy.id]
    list(book.release_session(2))
    assert freed(book) == [other.id, idle.id]
    list(book.release_session(2))
    book.check_integrity({}, Counter())
    assert book.usage(7)[0] == 1


def test_constants_expire_unless_used(book: Book) -> None:
    constant, busy = book.add("c", 10, owner="acme"), book.add("d", 10, owner="acme")
    assert book.expire() == 150.0
    leaf = book.add("l", 5, busy)
    book.later(60)
    book.add("m", 1, constant)
    list(book.release_session(1))
    assert set(freed(book)) == {leaf.id, leaf.id + 1}
    book.later(50)  # 110 s after the first use, 50 s after the second.
    book.expire()
    assert freed(book) == [busy.id]
    book.later(60)
    book.expire()
    assert freed(book) == [constant.id]
    assert book.expire() is None


def test_a_constant_with_forks_does_not_expire(book: Book) -> None:
    constant = book.add("c", 10, owner="acme")
    leaf = book.add("l", 5, constant)
    book.later(1000)
    book.expire()
    assert freed(book) == []
    book.retire(leaf)
    book.later(1000)
    book.expire()
    assert constant.id in freed(book)


def test_a_retired_ancestor_of_an_expired_context_is_freed_once(book: Book) -> None:
    root = book.add("r", 10, owner="acme")
    broken = book.add("b", 10, root, owner="acme")
    leaf = book.add("l", 5, broken, owner="acme")
    book.retire(broken)
    book.later(1000)
    book.expire()
    assert freed(book) == [leaf.id, broken.id, root.id]
    book.check_integrity({}, Counter())


def test_a_lost_engine_loses_all_contexts(book: Book) -> None:
    book.add_engine(8, 100)
    root = book.add("r", 10, owner="acme")
    leaf = book.add("l", 10, root)
    book.pin(leaf)
    assert book.owners.context_ids() == {root.id, leaf.id}
    book.remove_engine(7)
    assert book.owners.context_ids() == set()
    assert book.take_frees() == {}
    assert book.index.match(7, [b"r"]) is None
    assert len(book.index) == 0
    book.check_integrity({}, Counter())
    list(book.release_session(1))


def test_evict_idle(any_book: Book) -> None:
    root = any_book.add("r", 10)
    used = any_book.add("u", 10, root)
    any_book.pin(used)
    idle = any_book.add("i", 10, root)
    any_book.evict_idle(7)
    assert freed(any_book) == [idle.id]


def test_a_shared_context_outlives_the_session_that_opened_it(book: Book) -> None:
    idle, busy = book.add("i", 10), book.add("b", 10)
    book.pin(busy)
    book.owners.give_to_tenant(busy, "acme")
    list(book.release_session(1))
    assert freed(book) == [idle.id]
    book.check_integrity({busy.id: 1}, Counter())
    book.finish_generation(busy, 15, None, SOURCE)
    book.unpin(busy)
    assert book.index.match(7, [b"b"]) is not None
    book.later(101)
    book.expire()
    assert freed(book) == [busy.id]
    # The other context was not computed.
    assert book.kv_stats.total.freed == {FreeReason.EXPIRED: 15}


def fill(book: Book, size: int) -> None:
    """Start a run with `size` tokens, and evict for it."""
    book.pin(book.add("new", size))
    assert book.evict_to_capacity(7)


def end(book: Book, context: LedgerContext, source: Source) -> None:
    """Finish a run on the context, which the session may continue."""
    book.pin(context)
    book.finish_generation(context, context.length, None, source)
    book.unpin(context)


def test_the_session_with_the_latest_next_call_is_evicted_first(book: Book) -> None:
    fast, slow = Source("acme", "fast"), Source("acme", "slow")
    for _ in range(20):
        book.think_times.continued(9, fast, 2.0)
        book.think_times.continued(9, slow, 25.0)
    early, late = book.add("slow", 40), book.add("fast", 40)
    end(book, early, slow)
    end(book, late, fast)
    book.later(1)
    fill(book, 40)
    assert freed(book) == [early.id]


def test_a_session_that_is_overdue_is_evicted_first(book: Book) -> None:
    fast, slow = Source("acme", "fast"), Source("acme", "slow")
    for _ in range(20):
        book.think_times.continued(9, fast, 2.0)
        book.think_times.continued(9, slow, 25.0)
    gone, coming = book.add("fast", 40), book.add("slow", 40)
    end(book, gone, fast)
    end(book, coming, slow)
    book.later(20)
    fill(book, 40)
    assert freed(book) == [gone.id]


def test_the_context_with_the_latest_forecast_is_evicted_first(book: Book) -> None:
    _, far = book.add("near", 40), book.add("far", 40)
    book.expectations.add_waiting([b"near"], lambda: 55.0)
    book.expectations.add_waiting([b"far"], lambda: 100.0)
    fill(book, 40)
    assert freed(book) == [far.id]


def test_an_evicted_turn_passes_its_expected_call_to_its_parent(book: Book) -> None:
    for _ in range(20):
        book.think_times.continued(9, SOURCE, 2.0)
    first = book.add("1", 30)
    second = book.add("12", 30, first)
    end(book, second, SOURCE)
    other = book.add("other", 30)
    book.kv_stats.total.freed.clear()
    book._evict(second, FreeReason.ROOM)
    assert first.expected_call == (SOURCE, 50.0)
    fill(book, 45)
    assert freed(book) == [second.id, other.id]


def test_a_context_with_many_forks_is_expected_to_be_used_again(book: Book) -> None:
    often, once = book.add("often", 30, owner="acme"), book.add("once", 30, owner="acme")
    for _ in range(10):
        book.later(1)
        book.retire(book.add("fork", 1, often))
    book.retire(book.add("fork", 1, once))  # This context was used last.
    book.take_frees()
    book.later(5)
    fill(book, 50)
    assert freed(book) == [once.id]


def test_recomputed_tokens_are_counted_by_reason(book: Book) -> None:
    book.add_engine(8, 100)
    first = book.add("a", 60)
    first.mark_computed()
    assert book.kv_stats.record_prompt(7, 0, [(b"x", 10)]) is None
    assert book.kv_stats.record_recomputed(7, None, 10) == 0
    lost = book.kv_stats.record_prompt(8, 0, [(b"x", 10), (b"a", 60), (b"y", 70)])
    assert lost == ("elsewhere", 60)
    assert book.kv_stats.record_recomputed(8, lost, None) == 60
    fill(book, 60)
    lost = book.kv_stats.record_prompt(7, 5, [(b"x", 10), (b"a", 60), (b"y", 70)])
    assert lost == (FreeReason.ROOM, 55)
    assert book.kv_stats.record_recomputed(7, lost, 50) == 50  # 5 tokens were in its own cache.
    assert book.kv_stats.total.hit == 5
    assert book.kv_stats.total.recomputed == {"elsewhere": 60, FreeReason.ROOM: 50}
    assert book.kv_stats.engine(7).recomputed.total() == 50
    assert book.kv_stats.engine(7).evicted == 60
    assert book.kv_stats.engine(8).evicted == 0
