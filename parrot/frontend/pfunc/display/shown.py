"""Displays of a session's calls and variables in notebooks, and a cost report as text."""

from collections.abc import Iterable, Sequence
from html import escape

from parrot.protocol.public import CompletionInfo, SessionInfo

_SHOWN_CHARS = 4000  # Characters of a value that are shown.
_SHOWN_CALLS = 200  # Calls of a session that are shown.
_HEAD = ("call", "reads", "state", "engine", "prompt tokens", "cached", "output tokens", "seconds")
_COST_HEAD = ("function", "calls", "failed", "prompt tokens", "cached", "output tokens", "run s")


class ShownSession(SessionInfo):
    """A session that notebooks show as a table with one row per call and the variables it reads."""

    def _repr_html_(self) -> str:
        reads: dict[str, list[str]] = {}
        for edge in self.edges:
            reads.setdefault(edge.target, []).append(edge.variable)
        rows = [_row(call, reads.get(call.output_var_id, ())) for call in self.calls[:_SHOWN_CALLS]]
        more = len(self.calls) - len(rows)
        end = f"<p>and {more} more calls</p>" if more > 0 else ""
        return f"<p>Session {self.session_id}</p>{table_html(_HEAD, rows)}{end}"


def table_html(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """An HTML table. Cells are cut after 4,000 characters."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = ("".join(f"<td>{escape(cell[:_SHOWN_CHARS])}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><tr>{titles}</tr>{body}</table>"


def _row(call: CompletionInfo, reads: Iterable[str]) -> tuple[str, ...]:
    seconds = _run_seconds([call])
    return (
        f"{call.func_name or 'call'} → {call.output}",
        ", ".join(reads),
        call.state,
        call.engine or "",
        str(call.cached_tokens + call.computed_tokens),
        str(call.cached_tokens),
        str(call.output_tokens),
        f"{seconds:.2f}" if call.finished_s is not None else "",
    )


def variable_html(name: str, content: str | None) -> str:
    """A variable's name and the first 4,000 characters of its value, if the program has read it."""
    head = f"<b>{escape(name)}</b>"
    if content is None:
        return f"{head}: <i>not read yet</i>"
    more = len(content) - _SHOWN_CHARS
    end = f"<i>and {more} more characters</i>" if more > 0 else ""
    return f'{head}<pre style="white-space: pre-wrap">{escape(content[:_SHOWN_CHARS])}</pre>{end}'


def cost_report(info: SessionInfo, seconds: float) -> str:
    """A text table with the costs of each function, and a total for all calls in `seconds`. The
    column `cost` appears if ServeCore has prices."""
    by_function: dict[str, list[CompletionInfo]] = {}
    for call in info.calls:
        by_function.setdefault(call.func_name or "call", []).append(call)
    prices = {costs.func_name: costs.cost for costs in info.costs}
    has_prices = any(prices.values())
    rows = [
        (*_COST_HEAD, "cost")[: len(_COST_HEAD) + has_prices],
        *(
            (*_cost(name, calls), *[_money(prices.get(name, 0.0))] * has_prices)
            for name, calls in by_function.items()
        ),
        (
            *_cost(f"all, in {seconds:.2f} s", info.calls),
            *[_money(sum(prices.values()))] * has_prices,
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + "\n"
        for row in rows
    )


def _money(cost: float) -> str:
    """The cost as text, in the currency of the prices."""
    return f"{cost:.2f}" if cost >= 1 else f"{cost:.6f}"


def _cost(name: str, calls: Sequence[CompletionInfo]) -> tuple[str, ...]:
    cached = sum(call.cached_tokens for call in calls)
    prompt = cached + sum(call.computed_tokens for call in calls)
    return (
        name,
        str(len(calls)),
        str(sum(call.state == "failed" for call in calls)),
        str(prompt),
        f"{cached / prompt:.0%}" if prompt else "",
        str(sum(call.output_tokens for call in calls)),
        f"{_run_seconds(calls):.2f}",
    )


def _run_seconds(calls: Iterable[CompletionInfo]) -> float:
    """Total seconds on engines of the finished calls."""
    return sum(
        call.finished_s - call.started_s
        for call in calls
        if call.started_s is not None and call.finished_s is not None
    )
