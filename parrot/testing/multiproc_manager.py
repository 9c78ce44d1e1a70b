"""Run functions in parallel, each in its own process, and collect their results."""

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any


class MultiProcessManager:
    """Call `add_proc` for each function, then `run_all`. `data` holds the results: the key is
    the position in which the function was added, from 0."""

    def __init__(self) -> None:
        self.data: dict[int, Any] = {}
        self._jobs: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def add_proc(self, target: Callable[..., Any], args: Sequence[Any] = ()) -> None:
        """Add a function; its result must be picklable."""
        self._jobs.append((target, tuple(args)))

    def run_all(self) -> None:
        """Run all added functions in parallel and wait until all processes exit. Then raises
        `RuntimeError` with the traceback of the first failure, if there is one."""
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
        """Remove all functions and results."""
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
    except BaseException:  # noqa: BLE001 - the parent reports any failure
        sender.send((None, traceback.format_exc()))


def _receive(receiver: Connection) -> tuple[Any, str | None]:
    with receiver:
        try:
            value, failure = receiver.recv()
        except EOFError:
            return None, "it exited without a result"
        return value, failure
