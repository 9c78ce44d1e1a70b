"""Contexts whose contents are text: a tree, where a fork begins with a part of its parent.

    context 7   "You are a poet. " "Write of rain."          parent_len = 0
    context 8   `--- 16 chars ---' "Write of snow."          forked from 7 at parent_len = 16

Jobs on one context take turns in order of arrival, so a Generate may be sent while the Fill before
it still waits. A fork may ask for more than its parent has yet; it waits for the turn of the
parent's last job.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from parrot.protocol.engine_api import NO_PARENT, FillPiece, GenerateRequest
from parrot.protocol.errors import InvalidRequest, NotFound, OutOfMemory


async def _ended(turn: "asyncio.Future[None] | None") -> None:
    if turn is not None and not turn.done():
        await asyncio.wait((turn,))


def _check_fork(piece: FillPiece | GenerateRequest, creator: FillPiece | GenerateRequest) -> None:
    """`creator` is the piece of the same request that has created the context."""
    same_parent = piece.parent_context_id in (NO_PARENT, creator.parent_context_id)
    if not same_parent or piece.parent_len not in (None, creator.parent_len):
        raise InvalidRequest(
            f"context {piece.context_id} cannot be forked from context {piece.parent_context_id}: "
            "an earlier piece of the request creates it otherwise",
            param="parent_context_id",
        )


class Turn:
    """One job's place in the order of a context. `leave` lets the next job begin; leaving twice is
    harmless."""

    def __init__(self, before: "asyncio.Future[None] | None") -> None:
        self.before = before
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> None:
        await _ended(self.before)

    def leave(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


@dataclass(frozen=True, slots=True)
class Fork:
    """A fork not yet carried out, since the parent had too little text: it happens after another
    job's turn, and after what the same job did before. If `length` is None, it takes all
    that the parent has."""

    length: int | None
    after: "asyncio.Future[None] | None"


@dataclass(slots=True, eq=False)
class TextContext:
    """`jobs` are those whose turn on this context is not over. Freed contexts live on as parents
    until their last fork is gone."""

    context_id: int
    parent: "TextContext | None" = None
    parent_len: int = 0
    fork: Fork | None = None
    own_len: int = 0
    pieces: list[str] = field(default_factory=list)
    jobs: set[Any] = field(default_factory=set)
    last: "asyncio.Future[None] | None" = None

    def __len__(self) -> int:
        return self.parent_len + self.own_len

    @property
    def is_busy(self) -> bool:
        return self.last is not None and not self.last.done()

    def text(self) -> str:
        parts: list[str] = []
        context: TextContext | None = self
        end = len(self)
        while context is not None:
            parts.append("".join(context.pieces)[: max(0, end - context.parent_len)])
            end = min(end, context.parent_len)
            context = context.parent
        return "".join(reversed(parts))


class TextContexts:
    """Owns all contexts of an engine. A fork's shared part counts once, at its parent."""

    def __init__(self, capacity: int) -> None:
        """`capacity` in characters."""
        self.capacity = capacity
        self.num_chars = 0
        self._contexts: dict[int, TextContext] = {}

    def __len__(self) -> int:
        return len(self._contexts)

    def __iter__(self) -> Iterator[TextContext]:
        return iter(self._contexts.values())

    def enter(self, wanted: Iterable[FillPiece | GenerateRequest], job: object) -> dict[int, Turn]:
        """Take a turn on every context that a job uses, creating those that are new. An unknown
        parent, or one that is known to be too short, raises and leaves nothing behind."""
        turns: dict[int, Turn] = {}
        created: dict[int, FillPiece | GenerateRequest] = {}
        try:
            for piece in wanted:
                if piece.context_id not in self._contexts:
                    self._contexts[piece.context_id] = self._create(piece, turns)
                    created[piece.context_id] = piece
                elif (creator := created.get(piece.context_id)) is not None:
                    _check_fork(piece, creator)
                if piece.context_id not in turns:
                    turns[piece.context_id] = self._take_turn(piece.context_id, job)
        except (InvalidRequest, NotFound):
            for context_id, turn in turns.items():
                self.leave(context_id, turn, job)
            for context_id in created:
                del self._contexts[context_id]
            raise
        return turns

    def _create(self, piece: FillPiece | GenerateRequest, turns: Mapping[int, Turn]) -> TextContext:
        if piece.parent_context_id == NO_PARENT:
            return TextContext(piece.context_id)
        parent = self._contexts.get(piece.parent_context_id)
        if parent is None:
            raise NotFound(f"no context {piece.parent_context_id}", param="parent_context_id")
        length = piece.parent_len
        if parent.is_busy and (length is None or length > len(parent)):
            own = turns.get(parent.context_id)
            after = parent.last if own is None else own.before
            return TextContext(piece.context_id, parent, fork=Fork(length, after))
        child = TextContext(piece.context_id, parent)
        self._cut(child, length)
        return child

    def _take_turn(self, context_id: int, job: object) -> Turn:
        context = self._contexts[context_id]
        turn = Turn(context.last)
        context.last = turn.over
        context.jobs.add(job)
        return turn

    def leave(self, context_id: int, turn: Turn, job: object) -> None:
        turn.leave()
        if (context := self._contexts.get(context_id)) is not None:
            context.jobs.discard(job)
            if not context.is_busy:
                context.last = None

    async def ready(self, context_id: int, turn: Turn) -> TextContext:
        """The context, when it is this turn's and its fork is carried out."""
        await turn.wait()
        context = self._contexts[context_id]
        if (fork := context.fork) is not None:
            await _ended(fork.after)
            self._cut(context, fork.length)
            context.fork = None
        return context

    @staticmethod
    def _cut(child: TextContext, length: int | None) -> None:
        assert child.parent is not None
        known = len(child.parent)
        if length is not None and length > known:
            raise NotFound(
                f"context {child.parent.context_id} has {known} characters, not {length}",
                param="parent_len",
            )
        child.parent_len = known if length is None else length

    def fill(self, context: TextContext, text: str) -> None:
        if self.num_chars + len(text) > self.capacity:
            raise OutOfMemory(f"the contexts of this engine hold {self.capacity} characters")
        self.append(context, text)

    def append(self, context: TextContext, text: str) -> None:
        """For generated text: never refused. A context freed meanwhile is not counted."""
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
            assert bool(context.jobs) == context.is_busy, f"{context.context_id}: lost jobs"
            assert context.fork is None or not context.pieces, f"{context.context_id}: open fork"
