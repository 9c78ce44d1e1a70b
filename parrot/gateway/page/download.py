"""A run as a file: as JSON with all that the page shows, or as a trace for Perfetto."""

import asyncio
from typing import Any

import orjson

from parrot.gateway.page.chrome_trace import chrome_trace, session_of_rows
from parrot.gateway.page.finished import FinishedRun, taking
from parrot.gateway.page.privacy import hidden
from parrot.gateway.page.runs import RowContext
from parrot.serve.sessions import Session

_MAX_BYTES = 2**23  # Bytes of texts of a live run in a file.
_STEP_UNITS = 512  # Units of work after which other tasks may run.


async def live_run(session: Session, context: RowContext) -> FinishedRun:
    """The run of a live session as it is now."""
    num_units, steps = 0, taking(session, context, _MAX_BYTES)
    while True:
        try:
            num_units += next(steps)
        except StopIteration as ended:
            run: FinishedRun = ended.value
            return run
        if num_units >= _STEP_UNITS:
            num_units = 0
            await asyncio.sleep(0)


def run_json(run: FinishedRun, *, sees_values: bool) -> bytes:
    """`run`, its `calls` and `variables` as on the page, and `texts`. The pieces of a call's
    `prompt` and a variable's `text` are indices in `texts`, so that each text is stored once. Texts
    that did not fit are missing. `attempts` is a list."""
    sources = orjson.loads(run.sources) if sees_values else {}
    calls, variables = [], []
    for key, row in orjson.loads(run.rows).items():
        kind, _, name = key.partition(":")
        shown = row if sees_values else dict(hidden(row))
        if kind == "call":
            calls.append(shown | _call_fields(sources.get(name, {})))
        else:
            source = sources.get(name, {})
            variables.append({"id": name, **shown, "text": source.get("text")})
    texts = [text.decode() for text in run.strings] if sees_values else []
    shown = run.listed(sees_values=sees_values)
    return orjson.dumps({"run": shown, "calls": calls, "variables": variables, "texts": texts})


def _call_fields(source: dict[str, Any]) -> dict[str, Any]:
    fields = dict(source.get("run", {}))
    if "prompt" in source:
        fields["prompt"] = [
            {"text": piece["string"]} if "string" in piece else piece for piece in source["prompt"]
        ]
    if "source" in source:
        fields["source"] = source["source"]
    return fields


def run_trace(run: FinishedRun, *, sees_values: bool) -> bytes:
    """The run in the trace event format."""
    rows = run.view(sees_values=sees_values)
    return orjson.dumps(chrome_trace(session_of_rows(run.id, rows)))
