"""A finished run: the last view of a session, as JSON bytes. Its rows are those of a live session.

All texts are in `strings`, apart from the rows, because not every visitor may see them."""

from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

import orjson

from parrot.gateway.page.feed import Rows
from parrot.gateway.page.privacy import hidden, without_texts
from parrot.gateway.page.prompt import CallPrompt, PromptPiece
from parrot.gateway.page.rows import (
    MAX_CHARS,
    call_row,
    last_variables,
    run_fields,
    text_rows,
    variable_row,
)
from parrot.gateway.page.runs import (
    Row,
    RowContext,
    head_row,
    last_tasks,
    sum_row,
    was_stopped,
)
from parrot.protocol.errors import NotFound, ParrotError
from parrot.serve.graph.nodes import (
    Completion,
    CompletionState,
    PieceKind,
    SemanticVariable,
    Task,
    TextPiece,
    VariablePiece,
)
from parrot.serve.sessions import Session

_FRAME_BYTES = 2048  # Estimated bytes of a run without its rows and texts.
_STRING_BYTES = 64  # Estimated bytes of one string without its text.
_STEP_CHARS = 4096  # Characters of text that count as one unit of work.
_CALL_UNITS = 8  # Units of work of a call's row. A unit is about a microsecond.


class FinishedRun(NamedTuple):
    """The view of a session that has ended. Times in `row` are Unix time."""

    tenant: str
    row: Row  # of the list of runs: the head, the sums, `state` and `ended_at`
    rows: bytes  # JSON of the rows of calls and variables, by key
    sources: bytes  # JSON: by variable, the places of its value and its prompt in `strings`
    strings: tuple[bytes, ...]  # values and parts of prompts, in UTF-8

    @property
    def id(self) -> int:
        run_id: int = self.row["id"]
        return run_id

    @property
    def ended_at(self) -> float:
        return float(self.row["ended_at"])

    @property
    def size(self) -> int:
        """Its bytes, with an estimate of the objects around them."""
        texts = sum(map(len, self.strings)) + _STRING_BYTES * len(self.strings)
        return _FRAME_BYTES + len(self.rows) + len(self.sources) + texts

    def listed(self, *, sees_values: bool) -> Row:
        """The row of the list of runs."""
        return self.row if sees_values else dict(hidden(self.row))

    def view(self, *, sees_values: bool) -> Rows:
        """The rows of the run's view."""
        rows = {"session": self.row, **orjson.loads(self.rows)}
        return rows if sees_values else without_texts(rows)

    def variable(self, var_id: str, *, sees_values: bool) -> Rows:
        """The rows of a variable's view. Raises `NotFound`."""
        known = orjson.loads(self.rows)
        row = known.get(f"var:{var_id}")
        if row is None:
            raise NotFound(f"there is no variable {var_id} in run {self.id}")
        rows: dict[str, Row] = {"var": row}
        call = known.get(f"call:{row['producer']}")
        source = orjson.loads(self.sources).get(var_id, {}) if sees_values else {}
        if call is not None:
            rows["call"] = {"func": call["func_name"], "request_id": call["request_id"]}
            rows["call"] |= source.get("run", {})
            if "prompt" in source:
                rows["call"]["prompt"] = [self._piece(piece) for piece in source["prompt"]]
            if "source" in source:
                rows["call"]["source"] = self._text(source["source"])
        if not sees_values:
            return without_texts(rows)
        if "text" in source:
            rows |= text_rows(self._text(source["text"]))
        elif row["chars"]:
            row["is_left_out"] = True
        return rows

    def prompt(self, request_id: int, var_id: str | None) -> CallPrompt:
        """The prompt of a call, of its output `var_id` or its last output. Raises `NotFound`."""
        known, sources = orjson.loads(self.rows), orjson.loads(self.sources)
        call = called(known.values(), request_id, var_id, self.id)
        links: list[list[PromptPiece]] = []
        output = call["output_var_id"]
        while output is not None:
            source = sources.get(output, {})
            if "prompt" not in source:
                raise NotFound(f"the prompt was not kept: run {self.id} has too much text")
            pieces, earlier = source["prompt"], None
            if pieces and "var" in pieces[0] and "name" not in pieces[0]:
                earlier = pieces.pop(0)["var"]
            link = [self._prompt_piece(piece, sources) for piece in pieces]
            if links:
                name = known.get(f"var:{output}", {}).get("name", "")
                link.append(PromptPiece(PieceKind.OUTPUT, self._value(source), name))
            links.insert(0, link)
            output = earlier
        is_known = call["state"] == CompletionState.DONE and not call["reused"]
        num_tokens = call["cached_tokens"] + call["computed_tokens"]
        return CallPrompt(
            links,
            sources[call["output_var_id"]].get("is_chat", False),
            self.row["kind"] == "API",
            call["model"],
            call["cached_tokens"] if is_known and num_tokens else None,
            num_tokens if is_known and num_tokens else None,
            call["remark"],
        )

    def _prompt_piece(self, piece: Row, sources: dict[str, Row]) -> PromptPiece:
        if "string" in piece:
            kind = PieceKind(piece.get("kind", PieceKind.CONSTANT.value.decode()).encode())
            return PromptPiece(kind, self._text(piece["string"]))
        value = self._value(sources.get(piece["var"], {}))
        return PromptPiece(PieceKind.VALUE, value, piece["name"])

    def _value(self, source: Row) -> str | None:
        return self._text(source["text"]) if "text" in source else None

    def fields(self) -> dict[str, Any]:
        """The fields of the run's journal record."""
        return {
            "tenant": self.tenant,
            "row": self.row,
            "rows": orjson.Fragment(self.rows),
            "sources": orjson.Fragment(self.sources),
            "strings": [text.decode() for text in self.strings],
        }

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> "FinishedRun":
        strings = tuple(text.encode() for text in fields["strings"])
        rows, sources = orjson.dumps(fields["rows"]), orjson.dumps(fields["sources"])
        return cls(fields["tenant"], fields["row"], rows, sources, strings)

    def _piece(self, piece: Row) -> Row:
        """The piece as the page shows it."""
        if "string" in piece:
            return {"text": self._text(piece["string"])}
        return {name: piece[name] for name in ("var", "name") if name in piece}

    def _text(self, number: int) -> str:
        return self.strings[number].decode()


def called(rows: Iterable[Row], request_id: int, var_id: str | None, run_id: int) -> Row:
    """The row of the call's completion that makes `var_id`, or of its last one. Raises
    `NotFound`."""
    found = [
        row
        for row in rows
        if row.get("request_id") == request_id
        and row.get("kind") == "semantic"
        and var_id in (None, row["output_var_id"])
    ]
    if not found:
        raise NotFound(f"run {run_id} has no call {request_id} with a prompt")
    return found[-1]


class _Strings:
    """The texts of one run, each once, up to a maximum number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.texts: list[bytes] = []
        self._places: dict[str, int] = {}
        self._left = max_bytes

    def add(self, text: str) -> int | None:
        """The index of the text in `texts`. None if it does not fit."""
        text = text[:MAX_CHARS]
        if (place := self._places.get(text)) is not None:
            return place
        encoded = text.encode("utf-8", "replace")
        size = len(encoded) + _STRING_BYTES
        if size > self._left:
            return None
        self._left -= size
        self._places[text] = len(self.texts)
        self.texts.append(encoded)
        return self._places[text]


class RunEnd(NamedTuple):
    """The facts of a session's end."""

    at: float  # Unix time
    error: ParrotError  # of the variables that had no value
    was_busy: bool  # a reader still waited for a running call


def finishing(
    session: Session, ending: RunEnd, context: RowContext, max_bytes: int
) -> Generator[int, None, FinishedRun]:
    """Take the view of a session that has ended and whose variables are all settled. The texts of
    the last variables are kept, up to `max_bytes`. Yields the sizes of the steps."""
    run = yield from taking(session, context, max_bytes, ending.error)
    error = ending.error
    tasks = [task for call in session.graph.calls.values() for task in call.tasks]
    run.row["cancelled"] -= sum(_did_not_run(task, error) for task in tasks)
    was_left = ending.was_busy or (session.was_abandoned and _has_stopped_calls(tasks, error))
    is_stopped = was_left or _last_state(tasks, error) is CompletionState.CANCELLED
    state = "failed" if run.row["failed"] else "cancelled" if is_stopped else "finished"
    run.row.update(state=state, ended_at=round(ending.at, 3))
    return run


def taking(
    session: Session, context: RowContext, max_bytes: int, error: ParrotError | None = None
) -> Generator[int, None, FinishedRun]:
    """Take the view of a session, which is live unless its unsettled variables got `error`."""
    rows: dict[str, Row] = {}
    for task in last_tasks(session):
        rows[f"call:{task.outputs[0].id}"] = _ended_call(task, session, error)
        yield _CALL_UNITS
    strings = _Strings(max_bytes)
    sources: dict[str, Row] = {}
    variables = last_variables(session)
    for variable in reversed(variables):
        if source := _source(variable, strings):
            sources[variable.id] = source
        if isinstance(variable.producer, Completion):
            fields = run_fields(variable.producer, session, context)
            sources[variable.id] = source | {"run": fields}
        yield 1 + len(variable.partial_text) // _STEP_CHARS
    for variable in variables:
        rows[f"var:{variable.id}"] = _ended_variable(variable, session, error)
        yield 1
    return FinishedRun(
        session.tenant,
        head_row(session, context) | {"state": "active"} | sum_row(session, context),
        orjson.dumps(rows),
        orjson.dumps(sources),
        tuple(strings.texts),
    )


def _has_stopped_calls(tasks: Iterable[Task], error: ParrotError) -> bool:
    """Whether a reader or another call needed a task that the end of the session has stopped."""
    return any(
        task.outputs[0].error is error and task.times.activated is not None for task in tasks
    )


def _last_state(tasks: Iterable[Task], error: ParrotError) -> CompletionState:
    """The state of the call that ended last before the session."""
    ended = [task for task in tasks if task.is_finished and task.outputs[0].error is not error]
    last = max(ended, key=lambda task: task.times.finished or 0.0, default=None)
    if last is None:
        return CompletionState.DONE
    return CompletionState.CANCELLED if was_stopped(last) else last.state


def _did_not_run(task: Task, error: ParrotError | None) -> bool:
    """Whether no reader ever needed the task. The end of the session has not stopped it."""
    is_unsettled = error is not None and task.outputs[0].error is error
    return is_unsettled and task.times.activated is None


def _ended_call(task: Task, session: Session, error: ParrotError | None) -> Row:
    row = call_row(task, session.created_at)
    if _did_not_run(task, error):
        row |= {"state": CompletionState.IDLE.value, "finished_s": None}
    return row


def _ended_variable(variable: SemanticVariable, session: Session, error: ParrotError | None) -> Row:
    """The variable's row. The end of the session is not shown as an error of its variables."""
    row = variable_row(variable, session.created_at)
    if error is not None and variable.error is error:
        row["state"] = "empty"
        del row["errors"]
    return row


def _source(variable: SemanticVariable, strings: _Strings) -> Row:
    """The places of the variable's value, and of its producer's prompt or program."""
    found: Row = {}
    if variable.partial_text and (place := strings.add(variable.partial_text)) is not None:
        found["text"] = place
    task = variable.producer
    if isinstance(task, Completion):
        prompt = _prompt(task, strings)
        if prompt is not None:
            found["prompt"] = prompt
            if task.options.chat:
                found["is_chat"] = True
    elif task is not None and (place := strings.add(task.source)) is not None:
        found["source"] = place
    return found


def _prompt(task: Completion, strings: _Strings) -> list[Row] | None:
    """The pieces of the prompt. None if not all of them fit."""
    pieces: list[Row] = []
    if task.previous is not None:
        pieces.append({"var": task.previous.output.id})
    for piece in task.fill:
        if isinstance(piece, VariablePiece):
            pieces.append({"var": piece.variable.id, "name": piece.variable.name})
        elif (place := strings.add(piece.text)) is not None:
            pieces.append({"string": place} | _kind_field(piece))
        else:
            return None
    return pieces


def _kind_field(piece: TextPiece) -> Row:
    is_constant = piece.kind is PieceKind.CONSTANT
    return {} if is_constant else {"kind": piece.kind.value.decode()}
