"""The page's rows of the past: who used what, and what happened."""

from dataclasses import asdict
from typing import Any

from parrot.gateway.page.topic import Rows
from parrot.gateway.page.visitors import Visitor
from parrot.serve.core import ServeCore

Row = dict[str, Any]


def usage_rows(core: ServeCore, visitor: Visitor) -> Rows:
    """The calls, tokens and costs of the visitor's functions; of everybody's for the operator."""
    rows: dict[str, Row] = {}
    for tenant, function, usage in core.accounts:
        if visitor.tenant in (None, tenant):
            row = {"tenant": tenant, "function": function, **asdict(usage)}
            rows[f"usage:{tenant}:{function}"] = row
    return rows


def event_rows(core: ServeCore, visitor: Visitor, epoch: float) -> Rows:
    """Events of engines, and of the visitor's sessions. `epoch`: the clock's zero in Unix time."""
    rows: dict[str, Row] = {}
    for event in core.fleet.events:
        if event.tenant is not None and visitor.tenant not in (None, event.tenant):
            continue
        is_live = event.session_id is not None and core.sessions.find(event.session_id) is not None
        rows[f"event:{event.number}"] = {
            "at": round(epoch + event.at, 3),
            "kind": event.kind.value,
            "text": event.text,
            "engine": event.engine_name,
            "session": event.session_id,
            "var": event.var_id,
            "is_live": is_live,
        }
    return rows
