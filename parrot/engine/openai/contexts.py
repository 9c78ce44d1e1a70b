"""Contexts of text. They form a tree: a fork shares a prefix of its parent's text.

    context 7   "You are a poet. " "Write of rain."          parent_len = 0
    context 8   `--- 16 chars ---' "Write of snow."          forked from 7 at parent_len = 16

Jobs of one context run in order of arrival, so ServeCore may send a Generate while the Fill before
it is still waiting. A fork may need more text than its parent has. It then waits for the last job
of the parent: for its fills, or for its output if the fills are too short.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from parrot.protocol.engine_api import NO_PARENT, FillPiece, GenerateRequest
from parrot.protocol.errors import InvalidRequest, NotFound, OutOfMemory


def _check_fork(piece: FillPiece | GenerateRequest, creator: FillPiece | GenerateRequest) -> None:
    """Raises `InvalidRequest` if `piece` names another parent than `creator`, the earlier piece of
    the same request that created the context."""
    same_parent = piece.parent_context_id in (NO_PARENT, creator.parent_context_id)
    if not same_parent or piece.parent_len not in (None, creator.parent_len):
        raise InvalidRequest(
            f"context {piece.context_id} cannot be forked from context {piece.parent_context_id}: "
            "an earlier piece of the request gives it another parent",
            param="parent_context_id",
        )


@dataclass(frozen=True, slots=True)
class TextFork:
    """A pending fork, whose parent does not have enough text yet."""

    length: int | None  # Characters of the parent to share. None: all.
    # The fork happens after this turn of the parent. None: the fork's own job writes the parent's
    # text, so the parent is complete when the fork's turn begins.
    after: "ContextTurn | None"


@dataclass(slots=True, eq=False)
class TextContext:
    """A context. Only requests with its `salt` may use it. A freed context stays in memory as a
    parent until all its forks are freed. Lengths are in characters."""

    context_id: int
    salt: str = ""
    parent: "TextContext | None" = None
    parent_len: int = field(init=False, default=0)  # Length of the prefix shared with the parent.
    fork: TextFork | None = field(init=False, default=None)  # The pending fork that creates it.
    own_len: int = field(init=False, default=0)
    pieces: list[str] = field(init=False, default_factory=list)
    turns: list["ContextTurn"] = field(init=False, default_factory=list)  # Unfinished, in order.

    def __len__(self) -> int:
        return self.parent_len + self.own_len

    def holds(self, length: int | None) -> bool:
        """Whether the context has this many characters. False for None: its final length."""
        return length is not None and length <= len(self)

    def text(self) -> str:
        parts: list[str] = []
        context: TextContext | None = self
        end = len(self)
        while context is not None:
            parts.append("".join(context.pieces)[: max(0, end - context.parent_len)])
            end = min(end, context.parent_len)
            context = context.parent
        return "".join(reversed(parts))

    def apply_fork(self, fork: TextFork) -> None:
        """Set `parent_len`. The turn `fork.after` must be over, or have filled enough. Raises
        `NotFound` if the parent is too short."""
        assert self.parent is not None
        is_open = fork.after is None or not fork.after.over.done()
        known = len(self.parent) if fork.after is None or is_open else fork.after.final_len
        if fork.length is not None and fork.length > known:
            raise NotFound(
                f"context {self.parent.context_id} has {known} characters, not {fork.length}",
                param="parent_len",
            )
        self.parent_len = known if fork.length is None else fork.length
        self.fork = None


class ContextTurn:
    """The turn of one job on a context. It begins after all earlier turns of the context are over.
    `final_len` is the context's length in characters at the end of the turn."""

    def __init__(self, context: TextContext, job: Any) -> None:
        self.context = context
        self.job = job
        self.final_len = 0
        loop = asyncio.get_running_loop()
        self._filled = loop.create_future()  # The job appends only its output from then on.
        self.over: asyncio.Future[None] = loop.create_future()
        self._before = context.turns[-1].over if context.turns else None
        context.turns.append(self)

    async def ready(self) -> TextContext:
        """Wait until the turn begins and a pending fork is done. Returns the context."""
        if self._before is not None:
            await asyncio.wait((self._before,))
        if (fork := self.context.fork) is not None:
            if fork.after is not None:
                await asyncio.wait((fork.after._filled,))
                if self.context.parent is None or not self.context.parent.holds(fork.length):
                    await asyncio.wait((fork.after.over,))
            self.context.apply_fork(fork)
        return self.context

    def leave(self) -> None:
        """End the turn, so that the next job can begin. Idempotent."""
        if not self.over.done():
            self.final_len = len(self.context)
            self.filled()
            self.over.set_result(None)
            self.context.turns.remove(self)

    def filled(self) -> None:
        """The job appends only its output from now on. Idempotent."""
        if not self._filled.done():
            self._filled.set_result(None)


class TextContexts:
    """All contexts of an engine. Text that a fork shares with its parent is counted once."""

    def __init__(self, capacity: int) -> None:
        """`capacity` is in characters."""
        self.capacity = capacity
        self.num_chars = 0
        self._contexts: dict[int, TextContext] = {}

    def __iter__(self) -> Iterator[TextContext]:
        return iter(self._contexts.values())

    def enter(
        self, wanted: Iterable[FillPiece | GenerateRequest], job: object, salt: str = ""
    ) -> dict[int, ContextTurn]:
        """Create new contexts of a job and take a turn on each of its contexts.

        Raises `NotFound` if a parent is unknown, has another salt or is too short, and
        `InvalidRequest` for contradictory pieces. After an error nothing has changed."""
        turns: dict[int, ContextTurn] = {}
        created: dict[int, FillPiece | GenerateRequest] = {}
        try:
            for piece in wanted:
                context = self._contexts.get(piece.context_id)
                if context is None:
                    context = self._contexts[piece.context_id] = self._create(piece, turns, salt)
                    created[piece.context_id] = piece
                elif (creator := created.get(piece.context_id)) is not None:
                    _check_fork(piece, creator)
                elif context.salt != salt:
                    raise NotFound(
                        f"no context {piece.context_id} of this salt", param="context_id"
                    )
                if piece.context_id not in turns:
                    turns[piece.context_id] = ContextTurn(context, job)
        except (InvalidRequest, NotFound):
            for turn in turns.values():
                turn.leave()
            for context_id in created:
                del self._contexts[context_id]
            raise
        return turns

    def _create(
        self, piece: FillPiece | GenerateRequest, turns: Mapping[int, ContextTurn], salt: str
    ) -> TextContext:
        if piece.parent_context_id == NO_PARENT:
            return TextContext(piece.context_id, salt)
        parent = self._contexts.get(piece.parent_context_id)
        if parent is None or parent.salt != salt:
            raise NotFound(f"no context {piece.parent_context_id}", param="parent_context_id")
        child, length = TextContext(piece.context_id, salt, parent), piece.parent_len
        if parent.turns and (length is None or length > len(parent)):
            child.fork = TextFork(length, None if parent.context_id in turns else parent.turns[-1])
        else:
            child.apply_fork(TextFork(length, None))
        return child

    def fill(self, context: TextContext, text: str) -> None:
        if self.num_chars + len(text) > self.capacity:
            raise OutOfMemory(f"the contexts hold at most {self.capacity} characters in total")
        self.append(context, text)

    def append(self, context: TextContext, text: str) -> None:
        """Append generated text, even above the capacity. A freed context is not counted."""
        if text:
            context.pieces.append(text)
            context.own_len += len(text)
            if self._contexts.get(context.context_id) is context:
                self.num_chars += len(text)

    def free(self, context_id: int) -> TextContext | None:
        context = self._contexts.pop(context_id, None)
        if context is not None:
            self.num_chars -= context.own_len
        return context

    def check_integrity(self) -> None:
        counted = sum(context.own_len for context in self)
        assert counted == self.num_chars, f"{self.num_chars} characters counted, {counted} held"
        for context in self:
            held = sum(map(len, context.pieces))
            assert held == context.own_len, f"{context.context_id}: {held} != {context.own_len}"
            parent_len = len(context.parent) if context.parent is not None else 0
            assert context.parent_len <= parent_len, f"{context.context_id} exceeds its parent"
            assert context.fork is None or not context.pieces, f"{context.context_id}: open fork"
