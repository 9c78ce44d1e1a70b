"""A session's history: what its records say. `replay` reads them again."""

import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from typing import Any

import orjson
from pydantic import BaseModel, TypeAdapter

from parrot.protocol.errors import ParrotError
from parrot.protocol.sampling import Logprobs, WireLogprobs
from parrot.serve.graph.build import Prompt
from parrot.serve.graph.graph import SessionGraph
from parrot.serve.graph.nodes import CallOptions, Completion, Piece, RunStats, TextPiece
from parrot.serve.graph.variable import SemanticVariable
from parrot.serve.journal.journal import Journal
from parrot.serve.journal.record import RESERVED, Kind, Payload
from parrot.serve.shards.shard import ALONE, Shard
from parrot.utils.ids import derived_token, tokens_equal

LOGPROBS: TypeAdapter[Logprobs] = TypeAdapter(WireLogprobs)
_NO_STATS = [(field.name, getattr(RunStats(), field.name)) for field in fields(RunStats)]
_RESERVED = 1024  # ids at once
_SECRETS = {"session_auth", "session"}


def journal_secret(journal: Journal) -> bytes:
    """The secret that was made with the journal."""
    words = [journal.fact(f"secret {i}", secrets.randbits(63)) for i in range(4)]
    return b"".join(word.to_bytes(8) for word in words)


class SessionNumbers:
    """The ids of sessions, which only grow: with a journal they are reserved there in blocks,
    before the first is given out. A session's auth follows from its id and a secret, which is the
    journal's: so whoever has it can be told of a session that has ended, and nobody else."""

    def __init__(self, first: int, shard: Shard = ALONE) -> None:
        self.shard = shard
        self.next = self._end = shard.aligned(first)
        self._subject = ""  # the journal's, of the last block
        self._secret = secrets.token_bytes(32)

    def keep_in(self, journal: Journal) -> None:
        self._secret = journal_secret(journal)

    def auth(self, session_id: int) -> str:
        """The `session_auth` of a session that begins."""
        return derived_token(self._secret, session_id) + self.shard.mark

    def taken(self, session_id: int) -> None:
        """The next is greater than this one."""
        self.next = max(self.next, self.shard.aligned(session_id + 1))

    def is_auth(self, given: str, session_id: int, known: str | None) -> bool:
        """Whether `given` is the session's, which is `known` if the session is live."""
        return tokens_equal(given, self.auth(session_id) if known is None else known)

    def reserve(self, journal: Journal) -> None:
        """See to it that `next` is reserved."""
        if self.next < self._end:
            return
        if self._subject:
            journal.end(self._subject)
        self._end = self.next + _RESERVED * self.shard.step
        self._subject = f"ids below {self._end}"
        journal.append(self._subject, RESERVED, {"end": self._end})

    def restore(self, subject: str, fields: Payload) -> None:
        """All of a block may have been given out."""
        self._subject = subject
        self._end = self.next = self.shard.aligned(max(self.next, fields["end"]))


class History:
    """Appends what happens to one session to the journal."""

    def __init__(self, journal: Journal, session_id: int) -> None:
        self._journal = journal
        self._subject = str(session_id)
        self.require_room = journal.require_room
        self.published = journal.published

    def began(self, session: Mapping[str, Any]) -> None:
        self._journal.append(self._subject, Kind.SESSION, dict(session))

    def ended(self) -> None:
        self._journal.end(self._subject)

    def asked(
        self, kind: str, graph: SessionGraph, request: BaseModel
    ) -> AbstractContextManager[None]:
        """For the block in which the request changes the graph."""
        written = request.model_dump_json(exclude=_SECRETS, exclude_unset=True).encode()
        return self._entry(kind, graph, {"request": orjson.Fragment(written)})

    def created(self, graph: SessionGraph, name: str, content: str | None) -> None:
        """The program makes a variable now."""
        fields = {"upcoming": graph.ids.upcoming, "name": name, "content": content}
        self._journal.append(self._subject, Kind.VARIABLE, fields)

    def prompted(
        self, graph: SessionGraph, prompt: Prompt, usage: Mapping[str, int], *, is_kept: bool
    ) -> AbstractContextManager[None]:
        """For the block in which the prompt becomes a part of the graph."""
        fields = _prompt_fields(graph, prompt) | {"usage": dict(usage), "is_kept": is_kept}
        return self._entry(Kind.PROMPT, graph, fields)

    def settled(self, variable: SemanticVariable) -> None:
        """Nothing is written for one that failed because another did: that follows again."""
        if variable.origin is not None:
            return
        fields: Payload = {"variable": variable.id}
        if variable.error is not None:
            fields["error"] = error_fields(variable.error)
        else:
            fields["text"] = variable.text
            if variable.tokenized is not None:
                fields["tokenizer"] = variable.tokenized.tokenizer_id
                fields["ids"] = variable.tokenized.ids
        if (task := variable.producer) is not None:
            fields["state"] = task.state.value
            if isinstance(task, Completion):
                fields["stats"] = _stats_fields(task.stats)
        self._journal.append(self._subject, Kind.SETTLED, fields)

    def attempted(self, completion: Completion) -> None:
        fields = {
            "request": completion.request_id,
            "task": completion.id,
            "number": completion.stats.attempts,
            "engine": completion.stats.engine_name,
        }
        self._journal.append(self._subject, Kind.ATTEMPT, fields)

    def was_read(self) -> None:
        self._journal.append(self._subject, Kind.READ, {})

    def can_continue(self, key: bytes, completion: Completion) -> None:
        """A turn of a conversation may continue this one."""
        fields = {"key": key.hex(), "request": completion.request_id, "task": completion.id}
        self._journal.append(self._subject, Kind.ENDING, fields)

    def _entry(
        self, kind: str, graph: SessionGraph, fields: Payload
    ) -> AbstractContextManager[None]:
        return self._journal.recorded(
            self._subject, kind, fields | {"upcoming": graph.ids.upcoming}
        )


def error_fields(error: ParrotError) -> Payload:
    """The error and those that caused it."""
    fields: Payload = {**error.to_payload(), "status": error.status}
    if isinstance(error.__cause__, ParrotError):
        fields["cause"] = error_fields(error.__cause__)
    return fields


def _stats_fields(stats: RunStats) -> Payload:
    """The stats that are not as in the beginning."""
    changed = {name: value for name, none in _NO_STATS if (value := getattr(stats, name)) != none}
    if stats.logprobs is not None:
        own = Logprobs(stats.logprobs.width, tokens=[])
        own.extend(stats.logprobs)  # with its tokens, which no tokenizer may know later
        changed["logprobs"] = LOGPROBS.dump_python(own, mode="json")
    return changed


def _prompt_fields(graph: SessionGraph, prompt: Prompt) -> Payload:
    previous = prompt.previous
    return {
        "fill": [_piece_fields(piece) for piece in prompt.fill],
        "samplings": [s.model_dump(mode="json", exclude_unset=True) for s in prompt.samplings],
        "options": _options_fields(prompt.options),
        "previous": None if previous is None else [previous.request_id, previous.id],
        "output": None if prompt.output is None else prompt.output.id,
        "is_held": prompt.is_held,
        "conversation": prompt.conversation,
    }


def _options_fields(options: CallOptions) -> Payload:
    """All but the salt, which is the server's secret: its session knows it."""
    fields = asdict(options)
    del fields["cache_salt"]
    return fields


def _piece_fields(piece: Piece) -> list[Any]:
    if not isinstance(piece, TextPiece):
        return [piece.variable.id]
    fields: list[Any] = [piece.kind.value.decode(), piece.text]
    if piece.tokenized is not None:
        fields += [piece.tokenized.tokenizer_id, piece.tokenized.ids]
    return fields
