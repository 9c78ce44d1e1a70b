"""Run functions in processes of their own, at once, and collect what they return."""

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any


class MultiProcessManager:
    """Add functions, `run_all`, then read `data`: {0: ..., 1: ...} in order of adding."""

    def __init__(self) -> None:
        self.data: dict[int, Any] = {}
        self._jobs: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def add_proc(self, target: Callable[..., Any], args: Sequence[Any] = ()) -> None:
        """Add a function; its result must be picklable."""
        self._jobs.append((target, tuple(args)))

    def run_all(self) -> None:
        """Run what was added, all at once, and wait for all. Raises `RuntimeError` with the
        traceback of the first that failed, after the others have ended."""
        running = [_start(target, args) for target, args in self._jobs]
        failures = []
        for number, (process, receiver) in enumerate(running):
            value, failure = _receive(receiver)
            process.join()
            if failure is None:
                self.data[number] = value
            else:
                failures.append(f"process {number} failed: {failure}")
        if failures:
            raise RuntimeError(failures[0])

    def reset(self) -> None:
        """Forget the functions and what they returned."""
        self.data = {}
        self._jobs = []


def _start(
    target: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[multiprocessing.Process, Connection]:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=_run, args=(sender, target, args))
    process.start()
    sender.close()
    return process, receiver


def _run(sender: Connection, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        sender.send((target(*args), None))
    except BaseException:  # noqa: BLE001 - whatever it was, the parent is told
        sender.send((None, traceback.format_exc()))


def _receive(receiver: Connection) -> tuple[Any, str | None]:
    with receiver:
        try:
            value, failure = receiver.recv()
        except EOFError:
            return None, "it ended without a result"
        return value, failure
