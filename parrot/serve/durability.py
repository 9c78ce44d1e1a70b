"""Answers that wait for the journal: a client learns only of changes that survive a restart."""

import inspect
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import wraps
from typing import Any

from parrot.protocol.endpoint import Verb
from parrot.protocol.errors import Conflict, NotFound, SessionGone
from parrot.serve.command_log import CommandLog


class Wait(Enum):
    """The event that the answer of a verb waits for, if there is a journal."""

    DURABLE = "durable"
    """Until the verb's commands are on disk. Raises `InsufficientStorage` if they cannot be
    written."""
    PUBLISHED = "published"
    """Like `DURABLE`, but does not wait while the journal cannot be written. For verbs that end or
    show sessions."""
    NOTHING = "nothing"
    """Nothing: the verb changes no session, or waits for the journal itself."""


def durable_verb(
    verb: Verb,
    log: CommandLog | None,
    wait: Wait = Wait.DURABLE,
    undo: Callable[[Any], None] | None = None,
) -> Verb:
    """The verb, with an answer that waits for the journal. If the verb returns an awaitable, its
    result waits as `PUBLISHED`; server-sent events wait themselves. `undo` receives an answer that
    cannot be sent. Without a log, the verb is returned unchanged."""
    if log is None or wait is Wait.NOTHING:
        return verb

    async def settled(wait: Wait) -> None:
        await (log.durable() if wait is Wait.DURABLE else log.published())

    async def verb_with_wait(**arguments: Any) -> Any:
        now = wait
        try:
            result = verb(**arguments)
            if inspect.isawaitable(result):
                now = Wait.PUBLISHED
                result = await result
        except (Conflict, SessionGone):  # An earlier request has done it, and its answer was lost.
            await settled(now)
            raise
        except NotFound:  # An earlier request may have deleted it.
            await settled(Wait.PUBLISHED)
            raise
        if inspect.isasyncgen(result):
            return result
        try:
            await settled(now)
        except BaseException:  # for example, the client has disconnected
            if undo is not None:
                undo(result)
            raise
        return result

    return wraps(verb)(verb_with_wait)


def durable_errors(
    verb: Callable[..., Awaitable[Any]], log: CommandLog | None
) -> Callable[..., Awaitable[Any]]:
    """The verb, which changes nothing. Its errors about earlier changes wait for the journal, but
    not while it cannot be written. Without a log, the verb is returned unchanged."""
    if log is None:
        return verb

    async def verb_with_wait(**arguments: Any) -> Any:
        try:
            return await verb(**arguments)
        except (Conflict, SessionGone, NotFound):
            await log.published()
            raise

    return wraps(verb)(verb_with_wait)
