"""One ServeCore's share of an engine: its lease, and its calls, which keep to that."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from parrot.engine.owners.division import Division
from parrot.protocol.engine_api import (
    CHARS_PER_TOKEN,
    EngineInfo,
    GenerateRequest,
    Lease,
    LeaseUse,
    RuntimeInfo,
    ServerLoad,
)
from parrot.protocol.errors import QuotaExceeded

_MAX_WAITING = 4096


class _Call(NamedTuple):
    num_tokens: int
    admitted: "asyncio.Future[None]"


class Share:
    """A call beyond the lease waits until others of the same ServeCore have ended, and nobody else
    for it. While a ServeCore keeps to its lease that happens only where prompts are longer than it
    has estimated, or one of its calls was cancelled and its last step is under way. `num_waited`
    counts these calls; `num_tokens` are those that the calls inside were sent and may generate."""

    def __init__(self, division: Division, index: int, beside: "Sequence[Share]") -> None:
        """`beside`: the shares of all, this one among them."""
        self._division = division
        self._index = index
        self._beside = beside
        self._waiting: deque[_Call] = deque()
        self._due = asyncio.Event()  # when the next heartbeat should not wait for its time
        self._use: LeaseUse | None = None  # told last, if more than that is here
        self.num_calls = 0
        self.num_tokens = 0
        self.num_waited = 0

    def offer(self, info: EngineInfo) -> Lease:
        """The lease for the next heartbeat of the engine."""
        self._due.clear()
        lease = self._division.offer(self._index, info.tokens_capacity, info.tasks_capacity)
        self._admit()
        return lease

    def answered(self, use: LeaseUse | None) -> None:
        """See `Division.answered`. Calls that the ServeCore has cancelled count until they have
        ended here. Whose lease should be another by that gets it at once."""
        self._use = None
        if use is not None:
            calls, tokens = max(use.calls, self.num_calls), max(use.tokens, self.num_tokens)
            if (calls, tokens) != (use.calls, use.tokens):
                self._use = use
                use = use.model_copy(update={"calls": calls, "tokens": tokens})
        self._division.answered(self._index, use)
        self._wake_due()

    def wake(self) -> None:
        """Let the next heartbeat come at once."""
        self._due.set()

    async def due(self) -> None:
        """Wait until the next heartbeat should come at once."""
        await self._due.wait()

    def lost(self) -> None:
        """The ServeCore is not obeyed any more. Calls that wait go on, to be refused."""
        self._use = None
        self._division.lost(self._index)
        self._wake_due()
        while self._waiting:
            self._let_in(self._waiting.popleft())

    @asynccontextmanager
    async def place(self, request: GenerateRequest) -> AsyncIterator[None]:
        """A place for the call, when there is one, until the block ends. Raises `QuotaExceeded` if
        too many wait."""
        if len(self._waiting) >= _MAX_WAITING:
            raise QuotaExceeded("too many calls are beyond their ServeCore's lease of this engine")
        call = _Call(_size(request), asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._admit()
        self.num_waited += not call.admitted.done()
        try:
            await call.admitted
            yield
        finally:
            if call.admitted.cancelled():
                with suppress(ValueError):
                    self._waiting.remove(call)
            else:
                self.num_calls -= 1
                self.num_tokens -= call.num_tokens
                if self._use is not None:
                    self.answered(self._use)
            self._admit()

    def told(self, info: RuntimeInfo) -> RuntimeInfo:
        """The engine's state as this ServeCore is told it: calls of the others are others' load."""
        others = [one for one in self._beside if one is not self]
        num_calls = sum(one.num_calls for one in others)
        load = info.server_load or ServerLoad(num_running=self.num_calls + num_calls)
        added = {
            "num_others": load.num_others + num_calls,
            "other_tokens": load.other_tokens + sum(one.num_tokens for one in others),
        }
        return info.model_copy(update={"server_load": load.model_copy(update=added)})

    def _wake_due(self) -> None:
        for index in self._division.due():
            self._beside[index].wake()

    def _admit(self) -> None:
        max_tokens, max_calls = self._division.lease(self._index)
        while self._waiting and self.num_calls < max_calls:
            num_tokens = self.num_tokens + self._waiting[0].num_tokens
            if self.num_calls and num_tokens > max_tokens:
                return
            self._let_in(self._waiting.popleft())

    def _let_in(self, call: _Call) -> None:
        if not call.admitted.cancelled():
            self.num_calls += 1
            self.num_tokens += call.num_tokens
            call.admitted.set_result(None)


def shares(count: int) -> list[Share]:
    """The shares of an engine of so many ServeCores."""
    division, made = Division(count), list[Share]()
    made += [Share(division, index, made) for index in range(count)]
    return made


def _size(request: GenerateRequest) -> int:
    sizes = [
        len(piece.text or "") // CHARS_PER_TOKEN
        if piece.token_ids is None
        else len(piece.token_ids)
        for piece in request.fills
    ]
    return sum(sizes) + request.sampling_config.max_gen_length
