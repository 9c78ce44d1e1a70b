"""The model of a foreign server's prefix cache."""

from collections import Counter

from parrot.serve.contexts.index import LedgerContext, ServerCache
from tests.serve.contexts.ledger_book import Book

ENGINE = 7


def make(max_size: int | None = None, max_prompts: int | None = None) -> tuple[Book, ServerCache]:
    book = Book()
    book.add_engine(ENGINE, 10_000, has_server=True)
    cache = book.index.server_caches[ENGINE]
    cache.set_limits(max_size, max_prompts)
    return book, cache


def run(book: Book, key: str, size: int, parent: LedgerContext | None = None) -> LedgerContext:
    """Run a prompt, one second after the previous one."""
    book.later(1.0)
    context = book.add(key, size, parent)
    book.pin(context)
    book.evict_to_capacity(ENGINE)
    book.finish_generation(context, context.length, None, None)
    book.unpin(context)
    return context


def there(book: Book, *keys: str) -> list[str]:
    """The keys whose prompts the model holds."""
    return [key for key in keys if book.index.match(ENGINE, [key.encode()])]


def test_without_limits_all_prompts_stay() -> None:
    book, cache = make()
    for key in "abc":
        run(book, key, 1000)
    assert there(book, *"abc") == ["a", "b", "c"]
    assert cache.eviction_cost(None, 10**9, book.clock.now()) == 0.0


def test_the_least_recently_used_context_is_dropped_despite_an_expected_use() -> None:
    book, _ = make(max_size=250)
    first = run(book, "a", 100)
    run(book, "b", 100)
    book.expectations.add_queued([b"b"])
    run(book, "aa", 10, first)
    run(book, "c", 100)
    assert there(book, "a", "aa", "b", "c") == ["a", "aa", "c"]
    assert len(book.take_frees()[ENGINE]) == 1
    book.expectations.remove_queued([b"b"])
    book.check_integrity({}, Counter())


def test_a_shared_prefix_counts_once() -> None:
    book, _ = make(max_size=250)
    common = run(book, "common", 200)
    for key in "abc":
        run(book, key, 10, common)
    assert there(book, "common", *"abc") == ["common", "a", "b", "c"]


def test_contexts_of_ended_sessions_still_occupy_the_server() -> None:
    book, cache = make(max_size=250)
    run(book, "live", 100)
    book.retire(run(book, "dead", 100))
    assert there(book, "live", "dead") == ["live"]
    lost = cache.eviction_cost(None, 100, book.clock.now())
    assert 0 < lost <= 100, "the dead context still occupies the cache"
    run(book, "new", 100)
    assert there(book, "live", "new") == ["new"]


def test_a_context_that_was_not_computed_occupies_nothing() -> None:
    book, cache = make(max_size=150)
    run(book, "a", 100)
    broken = book.add("b", 100)
    book.pin(broken)
    book.retire(broken)
    book.unpin(broken)
    assert there(book, "a") == ["a"]
    assert cache.eviction_cost(None, 40, book.clock.now()) == 0.0


def test_a_server_that_keeps_one_prompt() -> None:
    book, cache = make(max_prompts=1)
    first = run(book, "a", 100)
    turn = run(book, "aa", 10, first)
    assert cache.eviction_cost(turn, 10, book.clock.now()) == 0.0
    assert 0 < cache.eviction_cost(first, 10, book.clock.now()) <= 10
    assert 10 < cache.eviction_cost(None, 10, book.clock.now()) <= 110
    run(book, "b", 100)
    assert there(book, "a", "aa", "b") == ["b"]


def test_a_prompt_replaces_the_prompt_that_it_continues() -> None:
    """A server with several slots reuses the slot with the same prefix."""
    book, _ = make(max_prompts=3)
    first = run(book, "a", 100)
    for key in ("a1", "b", "c", "a2", "a3"):
        run(book, key, 10, first if key[0] == "a" and key != "a" else None)
    assert there(book, "a", "a1", "b", "c", "a2", "a3") == ["a", "b", "c", "a3"]


def test_running_prompts_stay_until_they_finish() -> None:
    book, _ = make(max_size=50, max_prompts=1)
    contexts = [book.add(key, 100) for key in "ab"]
    for context in contexts:
        book.pin(context)
    book.evict_to_capacity(ENGINE)
    assert there(book, *"ab") == ["a", "b"]
    for context in contexts:
        book.finish_generation(context, 100, None, None)
        book.unpin(context)
    assert there(book, *"ab") == []


def test_a_prompt_with_a_fork_does_not_count_as_a_second_prompt() -> None:
    book, _ = make(max_prompts=1)
    first = book.add("a", 100)
    book.pin(first)
    run(book, "aa", 10, first)
    book.finish_generation(first, 120, None, None)
    book.unpin(first)
    assert there(book, "a", "aa") == ["a", "aa"]
    run(book, "b", 10)
    assert there(book, "a", "aa", "b") == ["b"]


def test_evicting_a_context_that_is_used_late_costs_little() -> None:
    book, cache = make(max_size=100)
    run(book, "a", 100)
    now = book.clock.now()
    soon, later = cache.eviction_cost(None, 100, now), cache.eviction_cost(None, 100, now + 3600)
    assert later < soon / 3
