"""A context ledger for tests."""

from parrot.serve.config import CoreConfig, GlobalSchedulerConfig, KvEviction
from parrot.serve.contexts.index import Boundary, LedgerContext, Owner
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.events import Events
from tests.support.manual_clock import ManualClock


class Book(ContextLedger):
    """A ledger on virtual time that records the contexts that it frees."""

    def __init__(self, timeout_s: float = 100.0, eviction: KvEviction = "next_use") -> None:
        self.clock = ManualClock(50.0)
        self.notices = 0
        self._frees: dict[int, list[int]] = {}  # Freed contexts, by engine.
        config = CoreConfig(
            constant_prefix_var_timeout=timeout_s,
            global_scheduler=GlobalSchedulerConfig(kv_eviction=eviction),
        )
        super().__init__(config, self.clock, self._note, Events())

    def _note(self, engine_id: int, context_id: int) -> None:
        self.notices += 1
        self._frees.setdefault(engine_id, []).append(context_id)

    def take_frees(self) -> dict[int, list[int]]:
        """The contexts freed since the last call, per engine."""
        frees, self._frees = self._frees, {}
        return frees

    def later(self, seconds: float) -> None:
        self.clock._now += seconds

    def add(
        self,
        key: str,
        size: int,
        parent: LedgerContext | None = None,
        *,
        at: int | None = None,
        owner: Owner = 1,
        reserved: int = 0,
        tenant: str = "",
    ) -> LedgerContext:
        parent_len = 0 if parent is None else parent.length if at is None else at
        length = parent_len + size
        boundary = Boundary(key.encode(), length, 0)
        return self.open(
            7,
            owner,
            [boundary],
            length=length,
            reserved=reserved,
            parent=parent,
            parent_len=parent_len,
            tenant=tenant,
        )
