"""Semantic variables: write-once text with one producer and many readers."""

import asyncio
import hashlib
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from parrot.protocol.errors import AlreadySet, ParrotError

if TYPE_CHECKING:
    from parrot.serve.graph.nodes import Reader, RunStats, Task


class VariableState(StrEnum):
    EMPTY = "empty"
    READY = "ready"
    FAILED = "failed"


def text_digest(text: str) -> bytes:
    """A text's identity: SHA-256, 32 bytes. Large texts take a millisecond a megabyte, so whoever
    holds one asks once."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The token ids of a variable's text as an engine generated them, so that a consumer on the
    same tokenizer (see `EngineInfo.tokenizer_id`) need not tokenise the text again."""

    tokenizer_id: str
    ids: tuple[int, ...]

    @property
    def digest(self) -> bytes:
        """The identity of these very tokens."""
        return hashlib.sha256(self.tokenizer_id.encode() + array("i", self.ids).tobytes()).digest()


class SemanticVariable:
    """A text to come. Its producer (an engine, a native function or the program) settles it once,
    with `set` or `fail`. Everything that waits for it learns of that from here, and only from here.

    While an engine generates it, `append` extends `partial_text`; readers of `stream` see the
    deltas and always end up with exactly `text`, whenever they came.

    Its place in the graph is between its `producer`, a task or None, and the tasks and readers that
    take it. `origin`: if it failed because an input of its producer did, the first failure."""

    __slots__ = (
        "_digest",
        "_settled_callbacks",
        "_stats",
        "_watchers",
        "consumers",
        "error",
        "id",
        "name",
        "origin",
        "partial_text",
        "producer",
        "readers",
        "session_id",
        "state",
        "tokenized",
    )

    def __init__(self, var_id: str, name: str, session_id: int) -> None:
        self.id = var_id
        self.name = name
        self.session_id = session_id
        self.state = VariableState.EMPTY
        self.partial_text = ""
        self.error: ParrotError | None = None
        self.tokenized: TokenizedText | None = None
        self.producer: Task | None = None
        self.consumers: list[Task] = []
        self.readers: list[Reader] = []
        self.origin: ParrotError | None = None
        self._digest: bytes | None = None
        self._stats: RunStats | None = None
        self._settled_callbacks: list[Callable[[SemanticVariable], None]] = []
        self._watchers: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return f"<SemanticVariable {self.name} {self.id} {self.state}>"

    @property
    def text(self) -> str:
        """The value. Only a ready variable has one."""
        assert self.state is VariableState.READY, self
        return self.partial_text

    @property
    def digest(self) -> bytes:
        """The value's. Only a ready variable has one."""
        if self._digest is None:
            self._digest = text_digest(self.text)
        return self._digest

    @property
    def is_settled(self) -> bool:
        return self.state is not VariableState.EMPTY

    @property
    def is_idle(self) -> bool:
        """Whether wanting it would set work going."""
        return self.producer is not None and not self.producer.demand and not self.is_settled

    @property
    def stats(self) -> "RunStats | None":
        """How the completion ran that makes or made it; None: no completion does."""
        return self._stats if self.producer is None else self.producer.stats

    def unlink(self) -> None:
        """Nothing follows from it any more. A reader may be about to tell of it still."""
        self._stats = self.stats
        self.producer = None
        self.consumers.clear()

    def append(self, delta: str) -> None:
        """The producer has generated some more text."""
        assert not self.is_settled, self
        if delta:
            self.partial_text += delta
            self._wake()

    def set(self, text: str, tokenized: TokenizedText | None = None) -> None:
        """Publish the value. `text` begins with what was appended. Raises `AlreadySet`."""
        if self.is_settled:
            raise AlreadySet(f"variable `{self.name}` is already {self.state}")
        assert text.startswith(self.partial_text), (self, self.partial_text, text)
        self.partial_text = text
        self.tokenized = tokenized
        self._settle(VariableState.READY)

    def fail(self, error: ParrotError) -> None:
        """Every reader, now and later, gets `error`. Raises `AlreadySet`."""
        if self.is_settled:
            raise AlreadySet(f"variable `{self.name}` is already {self.state}")
        self.error = error
        self._settle(VariableState.FAILED)

    def restart(self) -> None:
        """Forget the partial text: the producer was stopped because nobody reads the variable, and
        appends the text from its beginning if it runs again."""
        assert not self.is_settled, self
        self.partial_text = ""

    def on_settled(self, callback: Callable[["SemanticVariable"], None]) -> None:
        """Call `callback(self)` once, when the variable is settled; at once if it is."""
        if self.is_settled:
            callback(self)
        else:
            self._settled_callbacks.append(callback)

    def forget(self, callback: Callable[["SemanticVariable"], None]) -> None:
        """Take back `on_settled`, if it was not called yet."""
        with suppress(ValueError):
            self._settled_callbacks.remove(callback)

    async def wait(self) -> str:
        """The value, or raises the error. Timeouts and withdrawal are the caller's business."""
        while not self.is_settled:
            await self._changed()
        return self.result()

    def result(self) -> str:
        """The value of a settled variable, or raises its error."""
        if self.error is not None:
            raise self.error.again()
        return self.text

    async def stream(self) -> AsyncIterator[str]:
        """All the text from its beginning, in deltas as they come; raises the error."""
        sent = 0
        while True:
            if len(self.partial_text) > sent:
                delta = self.partial_text[sent:]
                sent = len(self.partial_text)
                yield delta
            elif self.error is not None:
                raise self.error.again()
            elif self.is_settled:
                return
            else:
                await self._changed()

    def _settle(self, state: VariableState) -> None:
        self.state = state
        self._wake()  # first, whatever a callback does
        callbacks, self._settled_callbacks = self._settled_callbacks, []
        for callback in callbacks:
            callback(self)

    def _wake(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    async def _changed(self) -> None:
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers.append(watcher)
        try:
            await watcher
        finally:
            if watcher.cancelled() and watcher in self._watchers:  # nothing has changed meanwhile
                self._watchers.remove(watcher)
