"""CUDA's streams on the CPU, whose work is done later. Each stream keeps its order. Otherwise the
order is random, within the limits that events set."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from parrot.engine.runner.host import cuda


class StreamPosition:
    """A position in a stream."""

    is_passed = False

    def passed(self) -> None:
        self.is_passed = True


class LateStream:
    """Replaces `torch.cuda.Stream`. `current` is the current stream of all threads, and `streams`
    has all streams."""

    current: "LateStream"
    rng: random.Random
    streams: "list[LateStream]"

    def __init__(self, device: object = None) -> None:
        self._work: deque[tuple[StreamPosition | None, Callable[[], object]]] = deque()
        self._pace = 1.0
        self.streams.append(self)

    def put(self, work: Callable[[], object], after: StreamPosition | None = None) -> None:
        self._work.append((after, work))

    def wait_event(self, event: "LateEvent") -> None:
        self.put(lambda: None, event.position)

    @property
    def can_run(self) -> bool:
        if not self._work:
            return False
        after, _ = self._work[0]
        return after is None or after.is_passed

    def run_next(self) -> None:
        _, work = self._work.popleft()
        work()

    @classmethod
    def run_any(cls) -> bool:
        """Do the next work of a random stream. Returns False if no stream has work that can be
        done."""
        able = [stream for stream in cls.streams if stream.can_run]
        if able:
            cls.rng.choices(able, [stream._pace for stream in able])[0].run_next()
        return bool(able)

    @classmethod
    def change_paces(cls) -> None:
        """Make some streams 100 times slower than the others."""
        for stream in cls.streams:
            stream._pace = cls.rng.choice((0.01, 1.0))

    @classmethod
    def all_done(cls) -> bool:
        return not any(stream._work for stream in cls.streams)


class LateEvent:
    def __init__(self, **options: bool) -> None:
        self.position: StreamPosition | None = None

    def record(self) -> None:
        self.position = StreamPosition()
        LateStream.current.put(self.position.passed)

    def query(self) -> bool:
        return self.position is None or self.position.is_passed

    def synchronize(self) -> None:
        while not self.query():
            assert LateStream.run_any(), "deadlock: streams wait for each other"

    def elapsed_time(self, end: "LateEvent") -> float:
        return 1.0


@contextmanager
def on(stream: LateStream) -> Iterator[None]:
    before, LateStream.current = LateStream.current, stream
    yield
    LateStream.current = before


class LateCopies(TorchFunctionMode):
    """Does copies with `non_blocking` later, in the current stream."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            LateStream.current.put(lambda: args[0].copy_(args[1]))
            return args[0]
        return func(*args, **(kwargs or {}))


def _gather(pool: torch.Tensor, blocks: torch.Tensor, pieces: torch.Tensor) -> None:
    places = blocks.long()
    LateStream.current.put(lambda: pieces.copy_(pool[:, places].transpose(0, 1)))


def _scatter(pieces: torch.Tensor, blocks: torch.Tensor, pool: torch.Tensor) -> None:
    places = blocks.long()
    LateStream.current.put(lambda: pool.index_copy_(1, places, pieces.transpose(0, 1)))


@contextmanager
def late_streams(seed: int) -> Iterator[None]:
    """Let `CudaCopies` copy between CPU tensors in late streams."""
    LateStream.rng, LateStream.streams = random.Random(seed), []
    LateStream.current = LateStream()
    with pytest.MonkeyPatch.context() as patch, LateCopies():
        for name, late in {"Event": LateEvent, "Stream": LateStream, "stream": on}.items():
            patch.setattr(torch.cuda, name, late)
        patch.setattr(torch.cuda, "current_stream", lambda device: LateStream.current)
        patch.setattr(cuda, "gather_blocks", _gather)
        patch.setattr(cuda, "scatter_blocks", _scatter)
        yield
