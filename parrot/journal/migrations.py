"""Migrations of a journal from older schema versions.

    1    the first version
    2    all models of calls have records of kind `model`, so that their calls wait for engines

A migration adds records or rewrites them. It runs in one transaction of the storage, once, before
the records are read. So a start that fails leaves the journal as it was."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from parrot.journal.log import Kind, Record
from parrot.serve.execution.fleet import MODEL
from parrot.utils.config import ConfigError

SCHEMA = 2
KINDS = (MODEL, Kind.CALL, Kind.GRAPH, Kind.PROMPT, "response")
"""The kinds of records that migrations read."""


def require_known(schema: object, place: str) -> int:
    """The schema version of a journal. Raises `ConfigError` for a newer or invalid version."""
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise ConfigError(
            f"journal: {place} has schema version {schema}, but this version of Parrot "
            f"reads 1 to {SCHEMA}: start the version that wrote it, or set another path"
        )
    return schema


def added_records(records: Iterable[Record], last_seq: int) -> list[Record]:
    """The records that version 2 adds to a journal of version 1. `records`: all of `KINDS`."""
    now, models = time.time(), dict[str, float]()
    known: set[str] = set()
    for record in records:
        fields = record.fields()
        if record.kind == MODEL:
            known.add(fields["name"])
            continue
        for model in _models_of(record.kind, fields):
            models.setdefault(model, record.at)
    return [
        Record(
            last_seq + number,
            now,
            "models",
            MODEL,
            orjson.dumps({"name": model, "since": int(since)}),
        )
        for number, (model, since) in enumerate(
            ((model, at) for model, at in models.items() if model not in known), start=1
        )
    ]


def _models_of(kind: str, fields: dict[str, Any]) -> Iterator[str]:
    match kind:
        case Kind.CALL:
            yield from fields["request"].get("models", ())
        case Kind.GRAPH:
            for call in fields["request"].get("calls", ()):
                yield from call.get("models", ())
        case Kind.PROMPT:
            yield from fields["options"]["models"]
        case "response" if fields.get("work"):
            yield fields["work"]["request"]["model"]
