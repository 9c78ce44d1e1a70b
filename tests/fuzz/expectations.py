"""Compute from the requests of a trace what its contexts hold, and which requests may fail."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from parrot.engine.core.jobs import Response
from parrot.protocol.engine_api import GenerateResponse, StreamChunk
from parrot.protocol.errors import ParrotError
from tests.fuzz.traces import NO_PARENT, Ask, Piece

Text = tuple[int, ...]


@dataclass(eq=False)
class ExpectedContext:
    """A context. It begins with the first `length` tokens of its parent. If `length` is None, it
    begins with the parent's first `mark` pieces."""

    context: int
    parent: "ExpectedContext | None"
    length: int | None
    mark: int
    pieces: "list[tuple[SentRequest, Piece]]" = field(default_factory=list)

    def text(
        self, num_pieces: int | None = None, as_if: "SentRequest | None" = None
    ) -> tuple[Text, bool]:
        """Return the known tokens of the first pieces, and whether these are all tokens. Pieces of
        the request `as_if` count even if it has failed."""
        found: Text = ()
        if self.parent is not None:
            creator = self.pieces[0][0]
            if creator.response is None and creator is not as_if:
                return (), False  # the fork may not exist, or may have fewer tokens
            mark = self.mark if self.length is None else None
            found, is_whole = self.parent.text(mark, as_if)
            if self.length is None:
                if not is_whole:
                    return found, False
            elif len(found) < self.length:
                return found, False
            else:
                found = found[: self.length]
        for asked, piece in self.pieces[:num_pieces]:
            if asked.response is None and asked is not as_if:
                return found, False
            found += piece.tokens
            if piece is asked.ask.pieces[-1] and isinstance(asked.response, GenerateResponse):
                found += tuple(asked.response.generated_ids)
        return found, True

    def lineage(self) -> "Iterable[ExpectedContext]":
        line: ExpectedContext | None = self
        while line is not None:
            yield line
            line = line.parent


@dataclass(eq=False)
class SentRequest:
    """A request with its answers and steps. If it may fail, `excuse` says why."""

    ask: Ask
    lines: list[ExpectedContext]
    began: int = 0
    ended: int = 0
    chunks: list[StreamChunk] = field(default_factory=list)
    followed: "list[list[StreamChunk | None]]" = field(default_factory=list)
    response: Response | None = None
    error: ParrotError | None = None
    excuse: str = ""

    @property
    def has_ended(self) -> bool:
        return self.response is not None or self.error is not None

    def end(self, outcome: Response | ParrotError) -> None:
        assert not self.has_ended, f"request {self.ask.number} has two ends"
        if isinstance(outcome, ParrotError):
            self.error = outcome
        else:
            self.response = outcome

    def prompt(self) -> Text | None:
        """Return all tokens before the output, or None if they are not known."""
        line, last = self.lines[-1], self.ask.pieces[-1]
        at = next(i for i, (_, piece) in enumerate(line.pieces) if piece is last)
        found, is_whole = line.text(at)
        return (*found, *last.tokens) if is_whole else None


class Expectations:
    """All requests and contexts of a trace."""

    def __init__(self) -> None:
        self.asked: dict[int, SentRequest] = {}
        self.lines: dict[int, ExpectedContext] = {}
        self._all: list[ExpectedContext] = []

    def enter(self, ask: Ask) -> SentRequest | None:
        """Record a request. Returns None for a request that names an unknown context, which is
        possible in a shortened trace."""
        made: dict[int, ExpectedContext] = {}
        lines = []
        for piece in ask.pieces:
            line = made.get(piece.context) or self.lines.get(piece.context)
            if line is None:
                parent = made.get(piece.parent) or self.lines.get(piece.parent)
                if parent is None and piece.parent != NO_PARENT:
                    return None
                if parent is None and not piece.tokens:
                    return None
                made[piece.context] = line = ExpectedContext(piece.context, parent, piece.length, 0)
            lines.append(line)
        asked = self.asked[ask.number] = SentRequest(ask, lines)
        if ask.read is None:
            self.lines |= made
            self._all += made.values()
        for line, piece in zip(lines, ask.pieces, strict=True):
            if line.parent is not None and not line.pieces:
                line.mark = len(line.parent.pieces)
            line.pieces.append((asked, piece))
        return asked

    def refused(self, line: ExpectedContext) -> None:
        """Forget a context that was never created. The next request that names it creates it."""
        if self.lines.get(line.context) is line:
            del self.lines[line.context]

    def cancelled(self, number: int) -> None:
        if (asked := self.asked.get(number)) is not None and not asked.has_ended:
            asked.excuse = "cancelled"

    def freed(self, contexts: Iterable[int]) -> None:
        """Excuse all running requests on these contexts or their forks."""
        gone = {line for context in contexts if (line := self.lines.pop(context, None))}
        for line in self._all:
            if gone.isdisjoint(line.lineage()):
                continue
            for asked, _ in line.pieces:
                if not asked.has_ended:
                    asked.excuse = asked.excuse or "freed"

    def gone(self) -> None:
        self.freed(list(self.lines))
        for asked in self.asked.values():
            if not asked.has_ended:
                asked.excuse = asked.excuse or "reset"
