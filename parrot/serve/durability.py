"""Answers that wait for the journal: a client learns only of changes that survive a restart."""

import inspect
from collections.abc import Callable
from enum import Enum
from functools import wraps
from typing import Any

from parrot.protocol.endpoint import Verb
from parrot.protocol.errors import Conflict, NotFound, SessionGone
from parrot.serve.sessions import CommandLog


class Wait(Enum):
    """The event that the answer of a verb waits for, where a journal is kept."""

    DURABLE = "durable"
    """Its commands are on disk. It raises `InsufficientStorage` if they cannot be written."""
    PUBLISHED = "published"
    """The same, but it does not wait while nothing can be written: for ends and for views."""
    NOTHING = "nothing"
    """It changes no session, or it waits itself."""


def lasting(
    verb: Verb,
    log: CommandLog | None,
    wait: Wait = Wait.DURABLE,
    undo: Callable[[Any], None] | None = None,
) -> Verb:
    """The verb with an answer that waits until its commands are durable. A verb that gives an
    awaitable only waits until they are published; server-sent events wait themselves. `undo` gets
    the answer if it cannot be given. Without a log it is the verb itself."""
    if log is None or wait is Wait.NOTHING:
        return verb

    async def settled(wait: Wait) -> None:
        await (log.durable() if wait is Wait.DURABLE else log.published())

    async def lasting_verb(**arguments: Any) -> Any:
        now = wait
        try:
            result = verb(**arguments)
            if inspect.isawaitable(result):
                now = Wait.PUBLISHED
                result = await result
        except (Conflict, SessionGone):  # it was done before, by a request whose answer was lost
            await settled(now)
            raise
        except NotFound:  # it may have been deleted before
            await settled(Wait.PUBLISHED)
            raise
        if inspect.isasyncgen(result):
            return result
        try:
            await settled(now)
        except BaseException:  # such as that the client has left
            if undo is not None:
                undo(result)
            raise
        return result

    return wraps(verb)(lasting_verb)
