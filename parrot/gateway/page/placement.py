"""The scheduler's last decisions, and the contexts on the engines."""

from collections.abc import Mapping
from heapq import nlargest
from typing import Any

from parrot.gateway.page.feed import Rows
from parrot.gateway.page.runs import RowContext
from parrot.gateway.page.visitors import Visitor
from parrot.serve.contexts.index import LedgerContext
from parrot.serve.core import ServeCore
from parrot.serve.scheduling.task import Decision

_MAX_CONTEXTS = 512  # The largest contexts are shown, with their ancestors.
Row = dict[str, Any]


def placement_rows(core: ServeCore, visitor: Visitor, context: RowContext) -> Rows:
    """Decisions and contexts of the visitor's sessions. Only the operator sees the predictions for
    other engines, because they depend on the load of all tenants."""
    rows: dict[str, Row] = {}
    names = {engine.id: engine.info.engine_name for engine in core.fleet}
    tenants = {session.id: session.tenant for session in core.sessions}
    for decision in core.dispatcher.decisions:
        if visitor.tenant in (None, tenants.get(decision.session_id)):
            key = f"decision:{decision.session_id}:{decision.request_id}:{decision.at}"
            row = rows[key] = _decision_row(decision, names, context.epoch)
            if visitor.tenant is None:
                row["compared"] = _compared(decision, names)

    def tenant_of(held: LedgerContext) -> str | None:
        owner = held.owner
        return owner if isinstance(owner, str) else tenants.get(owner)

    seen = [c for c in core.dispatcher.contexts() if visitor.tenant in (None, tenant_of(c))]
    for leaf in nlargest(_MAX_CONTEXTS, seen, key=_own_tokens):
        for link in leaf.lineage():
            rows[f"context:{link.id}"] = row = _context_row(link, names)
            is_own = visitor.tenant in (None, link.tenant)
            if visitor.sees_values and is_own:
                row["head"] = " ".join(link.head.split())
            if isinstance(link.owner, str):
                row["owner"] = context.name_of(link.owner)
            if not is_own:
                row["owner"] = ""
    return rows


def _own_tokens(context: LedgerContext) -> int:
    return context.length - context.parent_len


def _decision_row(decision: Decision, names: Mapping[int, str], epoch: float) -> Row:
    return {
        "at": round(epoch + decision.at, 3),
        "session": decision.session_id,
        "func": decision.func_name,
        "engine": _name(decision.engine_id, names),
        "prompt_tokens": decision.prompt_tokens,
        "to_compute": decision.to_compute,
        "waited_s": decision.waited_s,
    }


def _compared(decision: Decision, names: Mapping[int, str]) -> list[Row]:
    return [
        {"engine": _name(engine_id, names), "seconds": seconds}
        for engine_id, seconds in (decision.costs or {}).items()
    ]


def _context_row(context: LedgerContext, names: Mapping[int, str]) -> Row:
    return {
        "engine": _name(context.engine_id, names),
        "parent": None if context.parent is None else context.parent.id,
        "own_tokens": _own_tokens(context),
        "tokens": context.length,
        "forks": context.num_forks,
        "in_use": context.pins > 0,
        "owner": str(context.owner),
        "is_shared": isinstance(context.owner, str),
    }


def _name(engine_id: int, names: Mapping[int, str]) -> str:
    return names.get(engine_id, f"lost engine {engine_id}")
