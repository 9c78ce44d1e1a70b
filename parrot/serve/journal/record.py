"""Records: what the journal is made of."""

import zlib
from enum import StrEnum
from typing import Any, NamedTuple

import orjson

ENDED = "ended"
"""The kind of a subject's last record: nothing of the subject is needed any more."""

RESERVED = "reserved"
"""The kind of a record that tells which ids of sessions may have been given out."""

Payload = dict[str, Any]


class Kind(StrEnum):
    """The kinds of a session's records, besides `ENDED`."""

    SESSION = "session"  # it began
    CALL = "call"
    NATIVE = "native"
    GRAPH = "graph"
    VARIABLE = "variable"  # the program made one
    PROMPT = "prompt"  # a call without a template
    SETTLED = "settled"  # a variable has its value, or its error, which is its own
    ATTEMPT = "attempt"  # a completion was sent to an engine
    READ = "read"  # the first read that had to wait
    ENDING = "ending"  # where a turn of a conversation can be continued


class Record(NamedTuple):
    """Something that happened to a subject, a session or a response: `seq` grows from one to the
    next, `at` is when, in Unix time, and `payload` is JSON."""

    seq: int
    at: float
    subject: str
    kind: str
    payload: bytes

    @property
    def checksum(self) -> int:
        head = f"{self.seq} {self.at!r} {self.subject} {self.kind} ".encode()
        return zlib.crc32(self.payload, zlib.crc32(head))

    def fields(self) -> Payload:
        fields: Payload = orjson.loads(self.payload)
        return fields
