"""CUDA's streams on the CPU. Work is done at once, and each stream records the streams that it has
waited for."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


class Event:
    def __init__(self, **options: bool) -> None:
        self.stream: Stream | None = None

    def record(self) -> None:
        self.stream = Stream.current

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """All work is already done."""

    def elapsed_time(self, end: "Event") -> float:
        return 2.0


class Stream:
    current: "Stream"

    def __init__(self, device: object = None) -> None:
        self.awaited: list[Stream | None] = []

    def wait_event(self, event: Event) -> None:
        self.awaited.append(event.stream)

    def synchronize(self) -> None:
        """All work is already done."""


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


@contextmanager
def immediate_streams() -> Iterator[Stream]:
    """Replace CUDA's streams and events. Yields the stream of the steps."""
    Stream.current = stream = Stream()
    with pytest.MonkeyPatch.context() as patch:
        for name, fake in {"Event": Event, "Stream": Stream, "stream": on}.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)
        yield stream
