"""Stored responses have a byte limit. A stored response keeps its predecessors."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from parrot.gateway.vendors.responses.fields import MessageItem, ResponseItem
from parrot.gateway.vendors.responses.store import IdempotencyKey, ResponseStore, StoredResponse
from parrot.protocol.errors import Conflict, NotFound

MAX_BYTES = 80_000


def message(text: str) -> ResponseItem:
    return MessageItem(role="user", content=text)


def texts(items: list[ResponseItem]) -> list[str]:
    return [str(item.content) for item in items if isinstance(item, MessageItem)]


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = ResponseStore(MAX_BYTES)
        self.records: list[StoredResponse] = []
        self.begun: list[StoredResponse] = []
        self.contexts: dict[str, list[str]] = {}

    @rule(
        data=st.data(),
        tenant=st.sampled_from("ab"),
        size=st.sampled_from([0, 9_000, 90_000]),
        key=st.sampled_from([None, "k", "l"]),
    )
    def make(self, data: st.DataObject, tenant: str, size: int, key: str | None) -> None:
        """Store a response like a request does. Its predecessor is looked up first, and may be
        evicted meanwhile."""
        once = None if key is None else IdempotencyKey(key, "the same")
        if (
            once is not None
            and (known := self.store.find_by_idempotency_key(tenant, once)) is not None
        ):
            assert known.idempotency_key == once
            assert known.tenant == tenant
            with pytest.raises(Conflict):
                self.store.find_by_idempotency_key(tenant, IdempotencyKey(once.key, "another"))
            return
        own = [r for r in self.records if r.tenant == tenant and self.is_found(r)]
        previous = data.draw(st.sampled_from([None, *own[-8:]]))
        text = f"{len(self.records)} {'x' * size}"
        name = f"resp_{len(self.records)}"
        record = StoredResponse(name, tenant, previous, [message(text)])
        record.idempotency_key = once
        before = [] if previous is None else [*self.contexts[previous.id], f"says {previous.id}"]
        self.contexts[record.id] = [*before, text]
        self.records.append(record)
        self.begun.append(record)
        if once is not None or data.draw(st.booleans()):
            self.store.begin(record)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.begun:
            record = self.begun.pop(data.draw(st.integers(0, len(self.begun) - 1)))
            record.output = [message(f"says {record.id}")]
            record.body = b"{}"
            self.store.keep(record)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        found = [record for record in self.records if self.is_found(record)]
        if found:
            self.store.remove(data.draw(st.sampled_from(found[-8:])))

    @invariant()
    def is_whole(self) -> None:
        self.store.check_integrity()
        for record in self.records:
            if self.is_found(record):
                assert texts(record.context()) == self.contexts[record.id]

    def is_found(self, record: StoredResponse) -> bool:
        try:
            return self.store.find(record.id, record.tenant).output is not None
        except NotFound:
            return False


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStore = StoreMachine.TestCase


def kept(
    store: ResponseStore, name: str, previous: StoredResponse | None = None, size: int = 0
) -> StoredResponse:
    record = StoredResponse(name, "a", previous, [message("x" * size)], output=[], body=b"{}")
    store.keep(record)
    return record


def is_kept(store: ResponseStore, record: StoredResponse) -> bool:
    try:
        return store.find(record.id, record.tenant) is record
    except NotFound:
        return False


def test_the_least_recently_used_chain_is_evicted_first() -> None:
    store = ResponseStore(20_000)
    first = kept(store, "1")
    second = kept(store, "2", first)
    third = kept(store, "3")
    assert is_kept(store, second)  # a use
    fourth = kept(store, "4", size=4_000)
    assert [is_kept(store, one) for one in (first, second, third, fourth)] == [
        True,
        True,
        False,
        True,
    ]
    kept(store, "5", size=8_000)
    assert not is_kept(store, second)
    store.check_integrity()


def test_the_tenant_with_the_most_bytes_is_evicted_first() -> None:
    store = ResponseStore(40_000)
    other = StoredResponse("0", "b", None, [message("x")], output=[], body=b"{}")
    store.keep(other)
    for i in range(1, 20):
        kept(store, str(i))
    assert is_kept(store, other)


def test_a_response_that_is_too_large_evicts_nothing() -> None:
    store = ResponseStore(20_000)
    small = kept(store, "1")
    assert not is_kept(store, kept(store, "2", small, size=30_000))
    assert is_kept(store, small)
    store.check_integrity()


def test_responses_of_another_tenant_are_not_found() -> None:
    store = ResponseStore(20_000)
    record = kept(store, "1")
    with pytest.raises(NotFound):
        store.find(record.id, "b")
