"""The ledger's model of an engine's two tiers of KV memory: GPU and CPU."""

import random
from collections import Counter

from parrot.serve.config import CoreConfig
from parrot.serve.contexts.index import Boundary, LedgerContext
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.events import Events
from tests.support.manual_clock import ManualClock


def make(capacity: int = 100, host_capacity: int = 200) -> ContextLedger:
    ledger = ContextLedger(CoreConfig(), ManualClock(), lambda engine, context: None, Events())
    ledger.add_engine(1, capacity, 10, host_capacity)
    return ledger


def add(ledger: ContextLedger, length: int, parent: LedgerContext | None = None) -> LedgerContext:
    begin = 0 if parent is None else parent.length
    boundary = Boundary(b"%d" % random.getrandbits(60), length, 0)
    context = ledger.open(1, 7, [boundary], length=length, parent=parent, parent_len=begin)
    ledger.evict_to_capacity(1)
    ledger.check_integrity({}, Counter())
    return context


def test_the_most_recently_used_contexts_are_on_the_gpu():
    ledger = make()
    first, second, third = add(ledger, 40), add(ledger, 40), add(ledger, 40)
    assert [c.on_host for c in (first, second, third)] == [True, False, False]
    assert first.num_on_host(35) == 35
    ledger.pin(first)
    assert [c.on_host for c in (first, second, third)] == [False, True, False]
    ledger.unpin(first)


def test_a_fork_moves_to_cpu_memory_before_its_parent():
    ledger = make()
    root = add(ledger, 40)
    fork = add(ledger, 70, root)
    add(ledger, 40)
    assert (root.on_host, fork.on_host) == (False, True)
    assert fork.num_on_host(70) == 30
    assert fork.num_on_host(50) == 10
    assert fork.num_on_host(30) == 0


def test_a_context_is_evicted_only_when_both_tiers_are_full():
    ledger = make()
    contexts = [add(ledger, 50) for _ in range(6)]
    assert ledger.usage(1) == (6, 300)
    add(ledger, 50)
    assert ledger.usage(1) == (6, 300)
    assert ledger._memories[1].contexts.get(contexts[0].id) is None


def test_without_a_cpu_tier_all_contexts_are_on_the_gpu():
    ledger = make(host_capacity=0)
    first, _ = add(ledger, 50), add(ledger, 50)
    assert not first.on_host
    add(ledger, 50)
    assert ledger.usage(1) == (2, 100)
