"""Slots of the host tier: found by key, kept while they are read, evicted in order."""

from parrot.engine.core.host.pool import HostPool


def put(pool: HostPool, *keys: bytes) -> None:
    for key in keys:
        slot = pool.take()
        assert slot is not None
        pool.put(slot, key)


def evict(pool: HostPool, spared: bytes = b"") -> bytes | None:
    evicted = pool.evict(lambda key: key == spared)
    if evicted is None:
        return None
    pool.return_blank(evicted[0])
    return evicted[1]


def test_a_slot_is_found_once_it_is_written():
    pool = HostPool(2)
    slot = pool.take()
    assert pool.find(b"a") is None
    pool.check_integrity([slot])
    pool.put(slot, b"a")
    assert pool.find(b"a") == slot
    assert pool.num_blank == 1
    pool.check_integrity([])


def test_the_least_recently_touched_slot_is_evicted_first():
    pool = HostPool(4)
    put(pool, b"a", b"b", b"c", b"d")
    pool.touch(b"a")
    pool.touch(b"d", goes_first=True)
    assert [evict(pool) for _ in range(5)] == [b"d", b"b", b"c", b"a", None]


def test_protected_slots_move_to_the_end():
    pool = HostPool(3)
    put(pool, b"a", b"b", b"c")
    assert [evict(pool, b"a") for _ in range(3)] == [b"b", b"c", None]
    assert evict(pool) == b"a"


def test_slots_that_are_read_are_not_evicted():
    pool = HostPool(2)
    put(pool, b"a", b"b")
    slot = pool.find(b"a")
    pool.pin(slot)
    pool.pin(slot)
    assert [evict(pool), evict(pool)] == [b"b", None]
    pool.unpin(slot)
    assert evict(pool) is None
    pool.check_integrity([])
    pool.unpin(slot)
    assert evict(pool) == b"a"


def test_a_slot_that_is_discarded_during_a_read_is_blank_afterwards():
    pool = HostPool(1)
    put(pool, b"a")
    pool.pin(0)
    pool.discard(b"a")
    assert pool.find(b"a") is None
    assert pool.take() is None
    pool.check_integrity([])
    pool.unpin(0)
    assert pool.num_blank == 1
    pool.check_integrity([])
