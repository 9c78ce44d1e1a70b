"""Random histories of a context ledger, with an integrity check after each step."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from parrot.serve.config import KvEviction
from parrot.serve.contexts.index import Boundary, LedgerContext, Owner, Source
from tests.serve.contexts.ledger_book import Book

SOURCE = Source("acme", "f")
ENGINES = (7, 8, 9)
SERVED = 9  # This engine has a foreign server, which evicts by itself.
KEYS = [bytes([c]) for c in range(12)]


class Histories(RuleBasedStateMachine):
    """All operations of the executor and the core, in random order."""

    eviction: KvEviction = "next_use"

    def __init__(self) -> None:
        super().__init__()
        self.book = Book(eviction=self.eviction)
        self.running: list[LedgerContext] = []
        self.freed: set[int] = set()
        self.opened: set[int] = set()
        self.expected: Counter[bytes] = Counter()
        self.gone: set[int] = set()  # Contexts of lost engines.
        for engine_id in ENGINES:
            self.add_engine(engine_id)

    def add_engine(self, engine_id: int) -> None:
        self.book.add_engine(engine_id, 300, block_size=4, has_server=engine_id == SERVED)

    @rule(
        max_size=st.none() | st.integers(0, 200),
        max_prompts=st.none() | st.integers(1, 4),
    )
    def bound(self, max_size: int | None, max_prompts: int | None) -> None:
        self.book.index.server_caches[SERVED].set_limits(max_size, max_prompts)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4), size=st.integers(0, 300))
    def weigh(self, keys: list[bytes], size: int) -> None:
        cache, match = self.book.index.server_caches[SERVED], self.book.index.match(SERVED, keys)
        found = None if match is None else match.context
        lost = cache.eviction_cost(found, size, self.book.clock.now())
        assert 0 <= lost <= sum(cache._sizes.values())

    @rule(
        engine_id=st.sampled_from(ENGINES),
        owner=st.sampled_from([1, 2, 3, "acme", "rival"]),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4),
        size=st.integers(1, 60),
        reserved=st.integers(0, 40),
        tenant=st.sampled_from(["acme", "rival", "other"]),
    )
    def start(
        self,
        engine_id: int,
        owner: Owner,
        keys: list[bytes],
        size: int,
        reserved: int,
        tenant: str,
    ) -> None:
        book = self.book
        match = book.index.match(engine_id, keys)
        parent, parent_len = None, 0
        if match is not None:
            assert keys[match.num_covered - 1] == match.boundary.key
            parent, parent_len = match.context, match.boundary.length
        context = book.open(
            engine_id,
            owner,
            [Boundary(keys[-1], parent_len + size, 0)],
            length=parent_len + size,
            reserved=reserved,
            parent=parent,
            parent_len=parent_len,
            tenant=tenant,
        )
        self.opened.add(context.id)
        book.pin(context)
        if not book.evict_to_capacity(engine_id, tenant):
            self.all_idle_contexts_are_within_other_tenants_shares(engine_id, tenant)
        self.running.append(context)

    def all_idle_contexts_are_within_other_tenants_shares(
        self, engine_id: int, requester: str
    ) -> None:
        memory = self.book._memories[engine_id]
        tenants = {context.tenant for context in memory.contexts.values()}
        used: Counter[str] = Counter()
        for context in memory.contexts.values():
            used[context.tenant] += memory.size(context)
        for context_id in memory.idle_ids():
            owner = memory.contexts[context_id].tenant
            assert owner != requester
            assert used[owner] <= memory.capacity / len(tenants)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), output=st.integers(1, 50), key=st.sampled_from(KEYS))
    def finish(self, data: st.DataObject, output: int, key: bytes) -> None:
        context = data.draw(st.sampled_from(self.running))
        self.running.remove(context)
        length = context.length + min(output, context.reserved)
        self.book.finish_generation(context, length, Boundary(key, length, 0), SOURCE)
        self.book.unpin(context)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        context = data.draw(st.sampled_from(self.running))
        self.running.remove(context)
        self.book.retire(context, with_ancestors=data.draw(st.booleans()))
        self.book.unpin(context)

    @precondition(lambda self: self.usable())
    @rule(
        data=st.data(),
        owner=st.sampled_from([1, "acme", "rival"]),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4),
    )
    def chain(self, data: st.DataObject, owner: Owner, keys: list[bytes]) -> None:
        """Calls that continue each other, beginning with a context that exists."""
        parent = data.draw(st.sampled_from(self.usable()))
        for key in keys:
            length = parent.length + 5
            context = self.book.open(
                parent.engine_id,
                owner,
                [Boundary(key, length, 0)],
                length=length,
                parent=parent,
                parent_len=parent.length,
                tenant=str(owner),
                is_pinned=True,
            )
            self.opened.add(context.id)
            self.book.finish_generation(context, length, None, SOURCE)
            self.book.unpin(context)
            if context not in self.contexts():
                return  # The server is too small for it.
            parent = context

    def usable(self) -> list[LedgerContext]:
        return [c for c in self.contexts() if c.retired is None and not c.reserved]

    @precondition(lambda self: self.forked())
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        """Retire a context, like after an engine has reported that it is broken."""
        self.book.retire(data.draw(st.sampled_from(self.forked())))

    def forked(self) -> list[LedgerContext]:
        return [context for context in self.contexts() if context.children]

    def contexts(self) -> list[LedgerContext]:
        return [c for memory in self.book._memories.values() for c in memory.contexts.values()]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tenant=st.sampled_from(["acme", "rival"]))
    def share(self, data: st.DataObject, tenant: str) -> None:
        self.book.owners.give_to_tenant(data.draw(st.sampled_from(self.running)), tenant)

    @rule(session=st.sampled_from([1, 2, 3]))
    def release(self, session: int) -> None:
        list(self.book.release_session(session))
        left = self.book.owners.of_session(session)
        assert all(context.retired for context in left)

    @rule(engine_id=st.sampled_from(ENGINES), is_lost=st.booleans())
    def lose_memory(self, engine_id: int, is_lost: bool) -> None:
        if not is_lost:
            self.book.evict_idle(engine_id)
            return
        self.collect()
        self.gone.update(self.book._memories[engine_id].contexts)
        self.book.remove_engine(engine_id)
        self.running = [c for c in self.running if c.engine_id != engine_id]
        self.add_engine(engine_id)

    @rule(seconds=st.sampled_from([1, 60, 200]))
    def wait(self, seconds: int) -> None:
        self.book.later(seconds)
        self.book.expire()

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3))
    def expect(self, keys: list[bytes]) -> None:
        self.book.expectations.add_queued(keys)
        if len(keys) % 2:
            self.book.expectations.remove_queued(keys)
        else:
            self.expected.update(keys)

    def collect(self) -> None:
        for context_ids in self.book.take_frees().values():
            assert not self.freed & set(context_ids), "freed twice"
            self.freed.update(context_ids)

    @invariant()
    def ledger_is_consistent(self) -> None:
        self.collect()
        self.book.check_integrity(Counter(c.id for c in self.running), self.expected)
        live = {c for e in ENGINES for c in self.book._memories[e].contexts}
        assert live | self.freed | self.gone == self.opened
        assert not live & (self.freed | self.gone)

    def teardown(self) -> None:
        for context in self.running:
            self.book.unpin(context)
        for session in (1, 2, 3):
            list(self.book.release_session(session))
        for engine_id in ENGINES:
            self.book.evict_idle(engine_id)
            assert self.book.usage(engine_id) == (0, 0)
        assert len(self.book.index) == 0


class LruHistories(Histories):
    eviction: KvEviction = "lru"


TestHistories = Histories.TestCase
TestLruHistories = LruHistories.TestCase
TestLruHistories.settings = settings(max_examples=20, stateful_step_count=40)
TestHistories.settings = settings(max_examples=60, stateful_step_count=40)
