"""The state of random programs on a simulated cluster, and the checks of their invariants."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from parrot.protocol.errors import (
    Cancelled,
    EngineFailed,
    NoEngine,
    ParrotError,
    SessionGone,
    TimedOut,
)
from parrot.serve.sessions import Session
from parrot.simulation import SimCluster, SimEngine
from tests.e2e.sequential_reference import CallPlan, Place, Reference

LOSSES_OF_A_CALL = 3  # ServeCore fails a call after it has lost 3 engines.


@dataclass(eq=False)
class Read:
    """A running read. `task` returns `num_wanted` values of the variables `var_ids`, by id."""

    session: "Program"
    task: "asyncio.Task[dict[str, str]]"
    var_ids: list[str]
    is_timed: bool
    num_wanted: int = 1


@dataclass(eq=False)
class Program:
    """A program with one session."""

    scope: dict[str, Any]
    session: Session
    var_ids: list[str] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    plans: list[CallPlan] = field(default_factory=list)
    contexts: dict[int, tuple[str | Place, ...]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    wanted: set[str] = field(default_factory=set)  # variables with a reader since their submission


class World:
    """The programs, their reads, and the reference values."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.core = cluster.core
        self.reference = Reference()
        self.programs: list[Program] = []
        self.reads: list[Read] = []
        self.num_engines_lost = 0
        self.was_without_engines = False

    @property
    def engines(self) -> list[SimEngine]:
        return [engine for engine in self.cluster.engines.values() if engine.is_alive]

    def check_readers(self) -> None:
        """Check that ServeCore counts no reader that does not exist. A read that timed out may
        count for a moment."""
        reading = {v for r in self.reads if r.is_timed or not r.task.done() for v in r.var_ids}
        for program in self.programs:
            for var_id, node in program.session.graph.variables.items():
                assert not node.readers or var_id in reading | program.wanted, str(node)

    def check_all_done(self) -> None:
        for program in self.programs:
            graph = program.session.graph
            for call in graph.calls.values():
                for task in call.tasks:
                    assert not task.is_started, task.task.id
                    is_stuck = any(not node.is_settled for node in task.inputs)
                    assert not task.is_wanted or is_stuck, task.task.id
            for var_id, node in graph.variables.items():
                if node.is_settled and node.error is None:
                    assert node.text == self.reference.value(var_id)
                elif node.error is not None:
                    self.check_error(program, [var_id], node.error)
        self.core.check_integrity()

    def check(self, read: Read) -> None:
        error = None if read.task.cancelled() else read.task.exception()
        if error is None:
            values = read.task.result()
            assert len(values) == read.num_wanted
            assert set(values) <= set(read.var_ids)
            assert values == {var_id: self.reference.value(var_id) for var_id in values}
        elif isinstance(error, TimedOut):
            assert read.is_timed
        else:
            assert isinstance(error, ParrotError), error
            self.check_error(read.session, read.var_ids, error)

    def check_error(self, program: Program, var_ids: list[str], error: ParrotError) -> None:
        """Check that there is a reason for the error."""
        if isinstance(error, SessionGone):
            assert self.core.sessions.find(program.scope["session_id"]) is None
        elif isinstance(error, Cancelled):
            needed = set().union(*(self.reference.needs(var_id) for var_id in var_ids))
            assert needed & program.cancelled, error
        elif isinstance(error, NoEngine):
            assert self.was_without_engines, error
        else:
            assert isinstance(error, EngineFailed), error
            assert self.num_engines_lost >= LOSSES_OF_A_CALL, error

    def check_contexts(self) -> None:
        """Check that each engine has exactly the contexts of the ledger. Contexts of ended sessions
        may exist only as long as they have forks."""
        ledger = self.core.dispatcher._ledger
        for engine in self.engines:
            account = ledger._memories[engine.engine_id]
            tree = engine.service._require_core()._tree
            assert {context.context_id for context in tree} == set(account.contexts), engine.name
            for context in account.contexts.values():
                waits = context.retired is not None and bool(context.children)
                assert isinstance(context.owner, str) or waits, context
