"""Whose contexts go when an engine is full: each tenant keeps its part."""

import pytest

from parrot.serve.config import KvEviction
from parrot.serve.contexts.index import LedgerContext
from tests.serve.contexts.ledger_book import Book

WEIGHTS = {"crowd": 1.0, "chat": 1.0, "heavy": 3.0}


@pytest.fixture(params=["lru", "next_use"])
def book(request: pytest.FixtureRequest) -> Book:
    eviction: KvEviction = request.param
    book = Book(eviction=eviction)
    book.weigh = WEIGHTS.__getitem__
    book.add_engine(7, 1000)
    return book


def is_there(context: LedgerContext, book: Book) -> bool:
    return context.id in book._accounts[7].contexts


def test_a_crowd_that_fills_the_room_does_not_take_a_chats_prefix(book: Book) -> None:
    chat = book.add("conversation", 400, tenant="chat")
    for i in range(100):
        book.later(1)
        context = book.add(f"crowd {i}", 100, tenant="crowd")
        book.pin(context)
        assert book.make_room(7, "crowd")
        book.unpin(context)
    assert is_there(chat, book)
    assert book.usage(7) == (7, 1000)


def test_nor_does_one_whose_contexts_are_all_in_use(book: Book) -> None:
    chat = book.add("conversation", 400, tenant="chat")
    running = [book.add(f"crowd {i}", 100, tenant="crowd") for i in range(10)]
    for context in running:
        book.pin(context)
    assert not book.make_room(7, "crowd")
    assert is_there(chat, book)
    assert not book.make_spare_room(7, 10, "crowd")
    book.evict_idle(7)  # the engine has no memory for what runs
    assert not is_there(chat, book)
    for context in running:
        book.unpin(context)


def test_who_has_more_than_its_part_loses_the_rest(book: Book) -> None:
    first, second = [book.add(f"conversation {i}", 400, tenant="chat") for i in range(2)]
    book.later(1)
    book.pin(book.add("crowd", 500, tenant="crowd"))
    assert book.make_room(7, "crowd")
    assert not is_there(first, book)
    assert is_there(second, book)


def test_its_own_go_if_nobody_has_more_than_a_part(book: Book) -> None:
    other = book.add("other", 450, tenant="crowd")
    mine = book.add("mine", 450, tenant="chat")
    more = book.add("more", 150, tenant="chat")
    book.pin(more)
    assert book.make_room(7, "chat")
    assert is_there(other, book)
    assert not is_there(mine, book)


def test_parts_are_by_weight(book: Book) -> None:
    heavy = book.add("heavy", 700, tenant="heavy")
    light = book.add("light", 300, tenant="crowd")
    more = book.add("more", 50, tenant="heavy")
    book.pin(more)
    assert book.make_room(7, "heavy")
    assert is_there(heavy, book)
    assert not is_there(light, book)


def test_who_is_not_there_any_more_has_no_part(book: Book) -> None:
    chat = book.add("conversation", 400, tenant="chat")
    book.later(1000)
    for i in range(10):
        book.add(f"crowd {i}", 100, tenant="crowd")
    assert book.make_room(7, "crowd")
    assert not is_there(chat, book)


def test_who_is_not_there_any_more_loses_all_that_others_need(book: Book) -> None:
    """A part that came back with each context that went would keep the rest for two minutes."""
    for i in range(4):
        book.add(f"conversation {i}", 100, tenant="chat")
    book.later(1000)
    for i in range(9):
        book.pin(book.add(f"crowd {i}", 100, tenant="crowd"))
    assert book.make_room(7, "crowd")
    assert book.usage(7) == (10, 1000)


def test_a_tenant_alone_has_all(book: Book) -> None:
    first = book.add("first", 600, tenant="chat")
    second = book.add("second", 600, tenant="chat")
    book.pin(second)
    assert book.make_room(7, "chat")
    assert not is_there(first, book)
    book.check_integrity({second.id: 1}, book.prefixes.check_integrity())
