"""Measure ServeCore's CPU time by stage. The time of a method does not include that of other
measured methods that it calls."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from parrot.serve.contexts.forecast import ReadyPrefixes
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.execution.run_table import RunTable
from parrot.serve.graph.activation import Activation
from parrot.serve.scheduling.placement import LowestCostPlacer
from parrot.serve.scheduling.scheduler import Scheduler
from tests.scale.simulated.blocks import BlockPool
from tests.scale.simulated.device import Device
from tests.scale.simulated.programs import Session

MODEL = "model"
"""The stage of the modelled engines and programs, which are not part of ServeCore."""

STAGES: dict[str, dict[type, tuple[str, ...]]] = {
    "submit": {ServeCore: ("submit_call", "create_var")},
    "graph": {Activation: ("add_reader", "add_producer", "input_settled", "finished")},
    "prompt": {ReadyPrefixes: ("prompt", "expect")},
    "queue": {Scheduler: ("add", "schedule", "finished", "update_remaining_work")},
    "choice": {LowestCostPlacer: ("choose",)},
    "ledger": {
        ContextLedger: (
            "open",
            "pin",
            "evict_to_capacity",
            "finish_generation",
            "unpin",
            "release",
            "expire",
        ),
    },
    "runs": {
        Dispatcher: ("submit", "_pump"),
        RunTable: ("place", "_attempt_done"),
    },
    MODEL: {
        BlockPool: ("extend", "reserve", "append", "free"),
        Device: ("add", "_ring"),
        Session: ("submit", "give", "end"),
    },
}


class Stages:
    """CPU `seconds` of each stage within `counted()`."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._inner = 0.0  # of measured methods that the current method has called

    @contextmanager
    def counted(self) -> Iterator[None]:
        with ExitStack() as stack:
            for stage, methods in STAGES.items():
                for owner, names in methods.items():
                    for name in names:
                        method = self._counting(stage, getattr(owner, name))
                        stack.enter_context(patch.object(owner, name, method))
            yield

    def _counting(self, stage: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def counting(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            began = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                taken_s = time.thread_time() - began
                self.seconds[stage] += taken_s - self._inner
                self._inner = outer + taken_s

        return counting
