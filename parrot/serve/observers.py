"""Observers of ServeCore: told what programs ask for, and unable to disturb serving."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from parrot.protocol.engine_api import EngineInfo
from parrot.protocol.public import (
    CallResponse,
    NativeCallRequest,
    ReadOptions,
    SemanticCallRequest,
    SessionCreateRequest,
)
from parrot.serve.contexts.kv_log import KvCounts
from parrot.serve.graph.nodes import Task
from parrot.serve.sessions import Session
from parrot.utils.ids import IdCounter

logger = logging.getLogger(__name__)


class ObservedRead(NamedTuple):
    """`k`: a read of the first `k` of several variables; None: of one."""

    id: int
    options: ReadOptions
    var_ids: Sequence[str]
    k: int | None
    is_stream: bool


class Observer(Protocol):
    """Each method is called in the turn of the event loop in which the thing happened. Whoever
    derives from this need not override all of them."""

    def engine_registered(self, info: EngineInfo) -> None:
        return

    def session_created(self, session: Session, request: SessionCreateRequest) -> None:
        return

    def session_deleted(self, session: Session) -> None:
        """The program asked for the session's end, which comes next."""
        return

    def session_ended(self, session: Session) -> None:
        """The session has ended in whatever way; all its variables are settled."""
        return

    def call_submitted(
        self,
        session: Session,
        request: SemanticCallRequest | NativeCallRequest,
        response: CallResponse,
    ) -> None:
        return

    def task_finished(self, session: Session, task: Task) -> None:
        """The task has ended in a final state."""
        return

    def variable_created(
        self, session: Session, var_id: str, name: str, content: str | None
    ) -> None:
        return

    def variable_set(self, session: Session, var_id: str, content: str) -> None:
        return

    def cancel_asked(
        self, session: Session, *, request_id: int | None = None, var_id: str | None = None
    ) -> None:
        return

    def read_began(self, session: Session, read: ObservedRead) -> None:
        return

    def read_ended(self, session: Session, read: ObservedRead, error: BaseException | None) -> None:
        """`error`: what the read raised, also when it was cancelled; None if it was answered."""
        return

    def core_closed(self, kv: KvCounts) -> None:
        return


class Observers:
    """All observers of one ServeCore. One that raises is logged once and told nothing more."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = list(observers)
        self._read_ids = IdCounter()

    def __len__(self) -> int:
        return len(self._observers)

    def tell(self, report: Callable[[Observer], None]) -> None:
        for observer in tuple(self._observers):
            try:
                report(observer)
            except Exception:
                logger.exception("%s failed, and stops", type(observer).__name__)
                self._observers.remove(observer)

    @contextmanager
    def reading(
        self,
        session: Session,
        options: ReadOptions,
        var_ids: Sequence[str],
        *,
        k: int | None = None,
        is_stream: bool = False,
    ) -> Iterator[None]:
        """Tell of the beginning and the end of the read that is made in the block."""
        if not self._observers:
            yield
            return
        read = ObservedRead(self._read_ids.next(), options, var_ids, k, is_stream)
        self.tell(lambda one: one.read_began(session, read))
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            self.tell(lambda one: one.read_ended(session, read, failure))
