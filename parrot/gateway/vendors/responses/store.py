"""Responses that are kept, so that others can continue them.

    r1 <- r2 <- r3          a response holds its own items, and refers to the one that it continues
            `-- r4

Their bytes are bounded. When there is no room, those go that nothing continues, the least recently
used of the tenant that keeps the most: here r3 or r4, then r2. Whatever lives can be continued."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parrot.gateway.vendors.responses.fields import ResponseItem, output_items
from parrot.gateway.vendors.responses.writer import Background
from parrot.protocol.errors import Conflict, NotFound
from parrot.serve.sessions import CommandLog
from parrot.serve.tenants.limits import num_bytes
from parrot.utils.heaps import LazyHeap, LruDict
from parrot.utils.ids import new_token
from parrot.utils.shard import ALONE, Shard

_RECORD_BYTES = 4096  # what a record takes beside its texts
_ITEM_BYTES = 1024
_PART_BYTES = 160  # of a part of an answer that can be streamed again
_KEPT = "response"
_DELETED = "response_deleted"  # nobody finds it, but others continue it
Fields = Mapping[str, Any]


class Once(NamedTuple):
    """The key with which a client asks for a response so that it is made once, and a digest of what
    it asks for."""

    key: str
    fingerprint: str


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A response. `body`: its JSON, once it has ended. `output`: None if there is no answer. `job`:
    the work of a background response. `has_variables`: in its own items, which have their names."""

    id: str
    tenant: str
    previous: "StoredResponse | None"
    input: Sequence[ResponseItem]
    output: Sequence[ResponseItem] | None = None
    body: bytes = b""
    has_variables: bool = False
    once: Once | None = field(default=None, init=False)
    job: Background | None = field(default=None, init=False)
    num_bytes: int = field(default=0, init=False)
    is_kept: bool = field(default=False, init=False)
    is_deleted: bool = field(default=False, init=False)
    num_successors: int = field(default=0, init=False, repr=False)

    def context(self) -> list[ResponseItem]:
        """All items that the response was made from."""
        parts: list[Sequence[ResponseItem]] = [self.input]
        record = self.previous
        while record is not None:
            parts += [record.output or (), record.input]
            record = record.previous
        return [item for part in reversed(parts) for item in part]

    def history(self) -> list[ResponseItem]:
        """All items behind which the response can be continued."""
        return [*self.context(), *(self.output or ())]


@dataclass(slots=True)
class _Tenant:
    """`leaves`: its responses that nothing continues, the least recently used first."""

    leaves: LruDict[str, StoredResponse] = field(default_factory=LruDict)
    num_bytes: int = 0


class ResponseStore:
    """`on_dropped` hears of each that was removed: when it can be found no more, and, if others
    continue it, again when it is not kept any more either."""

    def __init__(self, max_bytes: int, shard: Shard = ALONE) -> None:
        self.on_dropped: Callable[[StoredResponse], None] = _nobody_hears
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._shard = shard
        self._by_id: dict[str, StoredResponse] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._by_key: dict[tuple[str, str], StoredResponse] = {}  # by tenant and key
        self._largest: LazyHeap[str, float] = LazyHeap()  # tenants with leaves, by bytes negated

    def new_token(self) -> str:
        """The token of the ids of a new response and its items."""
        return new_token() + self._shard.mark

    def find(self, response_id: str, tenant: str, *, param: str | None = None) -> StoredResponse:
        """Counts as a use. Raises `NotFound`, also for another tenant's, and `ElsewhereError` if
        another shard has it."""
        self._shard.require_token(response_id)
        record = self._by_id.get(response_id)
        if record is None or record.tenant != tenant:
            raise NotFound(f"no response `{response_id}` is kept here", param=param)
        if record.is_kept and not record.num_successors:
            self._tenants[tenant].leaves.touch(record.id)
        return record

    def find_item(self, item_id: str, tenant: str, *, param: str) -> ResponseItem:
        """An item of a response that is kept. Raises `NotFound`."""
        token = item_id.partition("_")[2].rpartition("_")[0]
        record = self.find(f"resp_{token}", tenant, param=param)
        for item in (*record.input, *(record.output or ())):
            if item.id == item_id:
                return item
        raise NotFound(f"no item `{item_id}` is kept here", param=param)

    def find_once(self, tenant: str, once: Once) -> StoredResponse | None:
        """The response that is kept, or being made, for this key. Raises `Conflict` if it is
        another."""
        record = self._by_key.get((tenant, once.key))
        if record is not None and record.once != once:
            raise Conflict("the key was used for another request", param="Idempotency-Key")
        return record

    @contextmanager
    def making(self, record: StoredResponse) -> Iterator[None]:
        """For the block in which it is made: if it is not kept then, its key is free again."""
        self._claim(record)
        try:
            yield
        finally:
            if not record.is_kept:
                self._release(record)

    def begin(self, record: StoredResponse) -> None:
        """It is being made, and can be found. It counts for nothing until it is kept."""
        self._by_id[record.id] = record
        self._claim(record)

    def keep(self, record: StoredResponse) -> None:
        """It has ended, and does not change any more. Nothing happens if it was removed, and one
        that alone exceeds the bound is removed."""
        if record.is_deleted:
            return
        if record.previous is not None and not record.previous.is_kept:
            record.input, record.previous = record.context(), None  # those went meanwhile
        record.num_bytes = _num_bytes(record)
        if record.num_bytes > self._max_bytes:
            self.remove(record)
            return
        record.is_kept = True
        tenant = self._tenants.setdefault(record.tenant, _Tenant())
        if record.previous is not None:
            record.previous.num_successors += 1
            tenant.leaves.pop(record.previous.id)
        self._by_id[record.id] = record
        self._claim(record)
        tenant.leaves.put(record.id, record)
        self._count(record.tenant, record.num_bytes)
        while self.num_bytes > self._max_bytes:
            largest = self._largest.top()
            assert largest is not None, self.num_bytes
            oldest = self._tenants[largest[1]].leaves.oldest()
            assert oldest is not None, largest
            self.remove(oldest[1])

    def remove(self, record: StoredResponse) -> None:
        """It can be found no more. Those that continue it keep its items."""
        record.is_deleted = True
        self._by_id.pop(record.id, None)
        self._release(record)
        if not record.is_kept:
            self.on_dropped(record)
            return
        leaves = self._tenants[record.tenant].leaves
        last: StoredResponse | None = record
        while last is not None and last.is_deleted and not last.num_successors:
            last.is_kept = False
            self.on_dropped(last)
            leaves.pop(last.id)
            self._count(last.tenant, -last.num_bytes)
            last = last.previous
            if last is not None:
                last.num_successors -= 1
        if record.is_kept:
            self.on_dropped(record)
        if last is not None and not last.num_successors:
            leaves.put(last.id, last)
            leaves.touch(last.id, newest=False)
            self._count(last.tenant, 0)

    def check_integrity(self) -> None:
        """Recount what is kept."""
        kept: dict[str, StoredResponse] = {}
        for tenant in self._tenants.values():
            for leaf in tenant.leaves.values():
                record: StoredResponse | None = leaf
                while record is not None:
                    assert record.is_kept, record.id
                    kept[record.id] = record
                    record = record.previous
        assert self.num_bytes == sum(record.num_bytes for record in kept.values())
        assert self.num_bytes <= self._max_bytes, self.num_bytes
        for name, tenant in self._tenants.items():
            own = [record.num_bytes for record in kept.values() if record.tenant == name]
            assert tenant.num_bytes == sum(own), name
            assert self._largest.key(name) == -tenant.num_bytes, name
        successors = Counter(r.previous.id for r in kept.values() if r.previous is not None)
        for record in kept.values():
            assert record.num_successors == successors[record.id], record.id
            assert record.is_deleted == (record.id not in self._by_id), record.id
            if record.once is not None and not record.is_deleted:
                assert self._by_key[record.tenant, record.once.key] is record, record.id
        assert not any(record.is_deleted for record in self._by_key.values())

    def _claim(self, record: StoredResponse) -> None:
        if record.once is not None:
            self._by_key[record.tenant, record.once.key] = record

    def _release(self, record: StoredResponse) -> None:
        if record.once is not None:
            place = record.tenant, record.once.key
            if self._by_key.get(place) is record:
                del self._by_key[place]

    def _count(self, name: str, num_bytes: int) -> None:
        """The tenant's leaves or bytes have changed. One with bytes has leaves, too."""
        tenant = self._tenants[name]
        tenant.num_bytes += num_bytes
        self.num_bytes += num_bytes
        if tenant.num_bytes:
            self._largest.set(name, -tenant.num_bytes)
        else:
            self._largest.discard(name)
            del self._tenants[name]


def _nobody_hears(record: StoredResponse) -> None:
    """They are kept in memory alone."""


def _num_bytes(record: StoredResponse) -> int:
    texts = [item.written for item in record.input]
    size = _RECORD_BYTES + len(record.body) + num_bytes(texts) + _ITEM_BYTES * len(texts)
    if record.job is not None:
        size += len(record.body) + _PART_BYTES * record.job.num_parts
    return size


class KeptResponses:
    """Writes down what the store keeps, and removes, and the work of background responses, which is
    done once more if it had not ended: `unfinished`, after the restart."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._restored: dict[str, StoredResponse] = {}
        self._journal: CommandLog | None = None
        self._is_closing: Callable[[], bool] = bool
        self.unfinished: dict[str, tuple[StoredResponse, Fields]] = {}
        self.restorers: dict[str, Callable[[str, Fields], None]] = {
            _KEPT: self._restore,
            _DELETED: self._restore_deleted,
        }

    def keep_in(self, journal: CommandLog, is_closing: Callable[[], bool]) -> None:
        """From now on. What ends without an answer when `is_closing` goes on in the next
        process."""
        self._journal, self._is_closing = journal, is_closing
        self._restored.clear()
        self._store.on_dropped = self._dropped

    def write(self, record: StoredResponse, work: Fields | None = None) -> None:
        """Journal a response, so that it can be restored; or the `work` of one that is being made,
        from which `unfinished` tells how to make it."""
        if self._journal is None or record.is_deleted:
            return
        if record.output is None and self._is_closing():
            return
        previous = record.previous
        output = None if record.output is None else [_item_fields(item) for item in record.output]
        fields = {
            "tenant": record.tenant,
            "previous": None if previous is None else previous.id,
            "input": [_item_fields(item) for item in record.input],
            "output": output,
            "body": record.body.decode(),
            "has_variables": record.has_variables,
            "work": work,
            "once": None if record.once is None else list(record.once),
        }
        self._journal.append(record.id, _KEPT, fields)

    async def durable(self, *, is_stored: bool) -> None:
        """Wait until what was written is on disk. Raises `InsufficientStorage` if it cannot be
        written now and the response `is_stored`: then its id must not be given to anybody, for
        whom it would be lost."""
        if self._journal is not None:
            await (self._journal.durable() if is_stored else self._journal.published())

    async def published(self) -> None:
        """Do the same, but do not wait while nothing can be written."""
        await self.durable(is_stored=False)

    async def has_room(self) -> None:
        """Wait until something can be written."""
        if self._journal is not None:
            await self._journal.has_room()

    def _dropped(self, record: StoredResponse) -> None:
        assert self._journal is not None
        if record.is_kept:
            self._journal.append(record.id, _DELETED, {})
        else:
            self._journal.end(record.id)

    def _restore(self, response_id: str, fields: Fields) -> None:
        if (known := self._restored.get(response_id)) is not None:
            self._store.remove(known)
        record = self._restored[response_id] = StoredResponse(
            response_id,
            fields["tenant"],
            self._restored.get(fields["previous"]),
            output_items(fields["input"]),
            None if fields["output"] is None else output_items(fields["output"]),
            fields["body"].encode(),
            has_variables=fields["has_variables"],
        )
        if (once := fields.get("once")) is not None:
            record.once = Once(*once)
        if (work := fields.get("work")) is not None:
            self._store.begin(record)
            self.unfinished[response_id] = record, work
        else:
            self.unfinished.pop(response_id, None)
            self._store.keep(record)

    def _restore_deleted(self, response_id: str, fields: Fields) -> None:
        self.unfinished.pop(response_id, None)
        self._store.remove(self._restored[response_id])


def _item_fields(item: ResponseItem) -> dict[str, Any]:
    # Not by pydantic as JSON: log probabilities are written already, as the journal takes them.
    return item.model_dump(exclude_none=True)
