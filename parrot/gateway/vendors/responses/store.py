"""Stores responses, so that other responses can continue them.

    r1 <- r2 <- r3          a response holds its own items, and refers to the previous response
            `-- r4

The stored bytes are limited. When they exceed the limit, leaves are evicted: responses that no
other response continues. The least recently used leaf of the tenant with the most bytes goes first:
here r3 or r4, then r2. All stored responses can be continued."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parrot.gateway.vendors.responses.fields import ResponseItem, output_items
from parrot.gateway.vendors.responses.writer import Background
from parrot.protocol.errors import Conflict, InsufficientStorage, NotFound
from parrot.serve.command_log import CommandLog
from parrot.serve.tenants.limits import num_bytes
from parrot.utils.heaps import LazyHeap, LruDict
from parrot.utils.ids import new_token
from parrot.utils.shard import ALONE, Shard

_RECORD_BYTES = 4096  # Estimated bytes of a record without its texts.
_ITEM_BYTES = 1024  # Estimated bytes of an item without its text.
_PART_BYTES = 160  # Estimated bytes of a part that can be streamed again.
_KEPT = "response"
_DELETED = "response_deleted"  # The response cannot be found, but other responses continue it.
Fields = Mapping[str, Any]


class IdempotencyKey(NamedTuple):
    """A client's idempotency key, and a digest of the request."""

    key: str
    fingerprint: str


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A response, its items and its link to the previous one."""

    id: str
    tenant: str
    previous: "StoredResponse | None"
    input: Sequence[ResponseItem]
    output: Sequence[ResponseItem] | None = None  # None: there is no answer
    body: bytes = b""  # the response as JSON, once it has ended
    has_variables: bool = False  # its own items contain names of session variables
    idempotency_key: IdempotencyKey | None = field(default=None, init=False)
    job: Background | None = field(default=None, init=False)  # None: not a background response
    num_bytes: int = field(default=0, init=False)
    is_cancelled: bool = field(default=False, init=False)
    record_seq: int = field(default=0, init=False)  # the journal record that readers wait for
    is_kept: bool = field(default=False, init=False)
    is_deleted: bool = field(default=False, init=False)
    num_successors: int = field(default=0, init=False, repr=False)

    def context(self) -> list[ResponseItem]:
        """All input items of the response, including those of earlier responses."""
        parts: list[Sequence[ResponseItem]] = [self.input]
        record = self.previous
        while record is not None:
            parts += [record.output or (), record.input]
            record = record.previous
        return [item for part in reversed(parts) for item in part]

    def history(self) -> list[ResponseItem]:
        """All items of the response and its predecessors. A successor's prompt starts with them."""
        return [*self.context(), *(self.output or ())]


@dataclass(slots=True)
class _Tenant:
    leaves: LruDict[str, StoredResponse] = field(default_factory=LruDict)  # without successors
    num_bytes: int = 0


class ResponseStore:
    """Owns the stored responses. `on_dropped` is called when a response can no longer be found. If
    other responses continue it, `on_dropped` is called again when its items are dropped."""

    def __init__(self, max_bytes: int, shard: Shard = ALONE) -> None:
        self.on_dropped: Callable[[StoredResponse], None] = _ignore_drop
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._shard = shard
        self._by_id: dict[str, StoredResponse] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._by_key: dict[tuple[str, str], StoredResponse] = {}  # by tenant and key
        self._largest: LazyHeap[str, float] = LazyHeap()  # tenants with leaves, by negative bytes

    def new_token(self) -> str:
        """A token for the ids of a new response and its items."""
        return new_token() + self._shard.mark

    def find(self, response_id: str, tenant: str, *, param: str | None = None) -> StoredResponse:
        """A response of this tenant; marks it as used. Raises `NotFound`, and `ElsewhereError` if
        another shard owns it."""
        self._shard.require_token(response_id)
        record = self._by_id.get(response_id)
        if record is None or record.tenant != tenant:
            raise NotFound(f"no stored response `{response_id}`", param=param)
        if record.is_kept and not record.num_successors:
            self._tenants[tenant].leaves.touch(record.id)
        return record

    def find_item(self, item_id: str, tenant: str, *, param: str) -> ResponseItem:
        """An item of a stored response. Raises `NotFound`."""
        token = item_id.partition("_")[2].rpartition("_")[0]
        record = self.find(f"resp_{token}", tenant, param=param)
        for item in (*record.input, *(record.output or ())):
            if item.id == item_id:
                return item
        raise NotFound(f"no item `{item_id}` in a stored response", param=param)

    def has_key(self, tenant: str, key: str) -> bool:
        """Whether a response is stored or in progress for this idempotency key."""
        return (tenant, key) in self._by_key

    def find_by_idempotency_key(self, tenant: str, once: IdempotencyKey) -> StoredResponse | None:
        """The response that is stored or in progress for this key. Raises `Conflict` if the key
        belongs to a different request."""
        record = self._by_key.get((tenant, once.key))
        if record is not None and record.idempotency_key != once:
            raise Conflict("the key was used for another request", param="Idempotency-Key")
        return record

    @contextmanager
    def making(self, record: StoredResponse) -> Iterator[None]:
        """Reserve the response's key in the block. If the response is not stored then, the key is
        released."""
        self._claim(record)
        try:
            yield
        finally:
            if not record.is_kept:
                self._release(record)

    def begin(self, record: StoredResponse) -> None:
        """Make an unfinished response findable. Its bytes count once it is stored."""
        self._by_id[record.id] = record
        self._claim(record)

    def keep(self, record: StoredResponse) -> None:
        """Store a finished response. Does nothing if it was deleted. A response larger than the
        limit is removed at once."""
        if record.is_deleted:
            return
        if record.previous is not None and not record.previous.is_kept:
            record.input, record.previous = record.context(), None  # the earlier ones were evicted
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
        """Delete a response. Responses that continue it keep its items."""
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
        """Recount the stored responses. For tests."""
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
            if record.idempotency_key is not None and not record.is_deleted:
                assert self._by_key[record.tenant, record.idempotency_key.key] is record, record.id
        assert not any(record.is_deleted for record in self._by_key.values())

    def _claim(self, record: StoredResponse) -> None:
        if record.idempotency_key is not None:
            self._by_key[record.tenant, record.idempotency_key.key] = record

    def _release(self, record: StoredResponse) -> None:
        if record.idempotency_key is not None:
            place = record.tenant, record.idempotency_key.key
            if self._by_key.get(place) is record:
                del self._by_key[place]

    def _count(self, name: str, num_bytes: int) -> None:
        """Update a tenant's bytes. A tenant with bytes always has leaves."""
        tenant = self._tenants[name]
        tenant.num_bytes += num_bytes
        self.num_bytes += num_bytes
        if tenant.num_bytes:
            self._largest.set(name, -tenant.num_bytes)
        else:
            self._largest.discard(name)
            del self._tenants[name]


def _ignore_drop(record: StoredResponse) -> None:
    """Without a journal, responses are only in memory."""


def _num_bytes(record: StoredResponse) -> int:
    texts = [item.written for item in record.input]
    size = _RECORD_BYTES + len(record.body) + num_bytes(texts) + _ITEM_BYTES * len(texts)
    if record.job is not None:
        size += len(record.body) + _PART_BYTES * record.job.num_parts
    return size


class KeptResponses:
    """Journals the stored and deleted responses, and the requests of background responses. After a
    restart, `unfinished` contains the background responses to resume."""

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

    def journal_to(self, journal: CommandLog, is_closing: Callable[[], bool]) -> None:
        """Journal changes from now on. A response that fails while `is_closing` is not journaled,
        so that the next process resumes it."""
        self._journal, self._is_closing = journal, is_closing
        self._restored.clear()
        self._store.on_dropped = self._dropped

    def write(self, record: StoredResponse, work: Fields | None = None) -> None:
        """Journal a response. `work`: the request of an unfinished background response, which is
        resumed after a restart."""
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
            "once": None if record.idempotency_key is None else list(record.idempotency_key),
        }
        record.record_seq = self._journal.append(record.id, _KEPT, fields)

    async def durable(self, *, is_stored: bool) -> None:
        """Wait until all written records are on disk. Raises `InsufficientStorage` if they cannot
        be written and the response `is_stored`: a client must not receive the id of a response
        that would be lost."""
        if self._journal is not None:
            await (self._journal.durable() if is_stored else self._journal.published())

    async def stored(self, record: StoredResponse) -> None:
        """Wait until the response is on disk as it is now. Raises `InsufficientStorage` if it
        cannot be written, unless it was cancelled."""
        if self._journal is None:
            return
        try:
            await self._journal.stored(record.record_seq)
        except InsufficientStorage:
            if not record.is_cancelled:
                raise

    async def writable(self) -> None:
        """Wait until new work is accepted."""
        if self._journal is not None:
            await self._journal.writable()

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
            record.idempotency_key = IdempotencyKey(*once)
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
    # `model_dump` without JSON mode keeps log probabilities as they are: they are already JSON.
    return item.model_dump(exclude_none=True)
