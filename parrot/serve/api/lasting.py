"""Verbs whose answers are for good."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

from parrot.serve.core import ServeCore

T = TypeVar("T")


def lasting_verbs(core: ServeCore) -> Callable[[Callable[..., T]], Callable[..., T | Awaitable[T]]]:
    """Verbs that answer when what they did is on disk, if it is written down at all."""
    journal = core.sessions.journal
    if journal is None:
        return lambda verb: verb

    def lasting(verb: Callable[..., T]) -> Callable[..., Awaitable[T]]:
        @wraps(verb)
        async def do(**arguments: Any) -> T:
            answer = verb(**arguments)
            await journal.durable()
            return answer

        return do

    return lasting
