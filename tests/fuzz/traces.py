"""Traces: sequences of engine operations as values, which can be stored in files."""

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Self

NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class Setup:
    """The configuration of the engine. With `launches`, steps are launched ahead. With
    `reports_late`, copies between GPU and CPU memory are reported late, and some fail. Steps with
    the token `poison` fail."""

    num_blocks: int = 64
    block_size: int = 4
    num_host_blocks: int = 0
    max_seq_len: int = 160
    chunk: int | None = None
    max_batch: int = 8
    max_batched: int = 64
    max_total: int | None = None
    mixed_fill: int = 512
    policy: str = "priority"
    prefix_caching: bool = True
    max_draft: int = 0
    launches: bool = False
    reports_late: bool = False
    shares_prefix: bool = True
    poison: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens for a context. If the context does not exist, it is forked from `parent`."""

    context: int
    tokens: tuple[int, ...] = ()
    parent: int = NO_PARENT
    length: int | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. With `sampling`, it generates. With `echoes`, its drafts are nearly its output.
    With `read`, it requests an embedding or scores."""

    number: int
    pieces: tuple[Piece, ...]
    sampling: dict[str, Any] | None = None
    priority: int = 0
    stream: bool = False
    salt: str = ""
    drafts: tuple[tuple[int, ...], ...] = ()
    echoes: bool = False
    read: str | None = None


Kind = Literal["steps", "cancel", "free", "follow", "leave", "fault", "reset"]


@dataclass(frozen=True, slots=True)
class Act:
    """Any other operation. `number` is a number of steps, or that of the target request. `contexts`
    are freed. A fault makes the next step fail once."""

    kind: Kind
    number: int = 0
    contexts: tuple[int, ...] = ()


Op = Ask | Act


@dataclass(frozen=True, slots=True)
class Trace:
    setup: Setup
    ops: tuple[Op, ...]

    def to_json(self) -> dict[str, Any]:
        """Return JSON without fields that have their default."""
        plain = Setup()
        setup = {k: v for k, v in asdict(self.setup).items() if v != getattr(plain, k)}
        return {"setup": setup, "ops": [_op_to_json(op) for op in self.ops]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(Setup(**value["setup"]), tuple(_op_from_json(op) for op in value["ops"]))

    def with_ops(self, ops: tuple[Op, ...]) -> "Trace":
        return replace(self, ops=ops)

    def __str__(self) -> str:
        value = self.to_json()
        lines = ["setup " + json.dumps(value["setup"])] + [json.dumps(op) for op in value["ops"]]
        return "\n".join(lines)


def _op_to_json(op: Op) -> dict[str, Any]:
    value = asdict(op)
    plain = {field.name: field.default for field in fields(op)}
    kept = {k: v for k, v in value.items() if v != plain[k]}
    if isinstance(op, Ask):
        pieces = []
        for piece in op.pieces:
            found = asdict(piece)
            pieces.append({k: v for k, v in found.items() if v not in ((), NO_PARENT, None)})
        kept["pieces"] = pieces
    return kept


def _op_from_json(value: dict[str, Any]) -> Op:
    if "kind" in value:
        return Act(**{**value, "contexts": tuple(value.get("contexts", ()))})
    pieces = [Piece(**{**p, "tokens": tuple(p.get("tokens", ()))}) for p in value["pieces"]]
    drafts = tuple(tuple(text) for text in value.get("drafts", ()))
    return Ask(**{**value, "pieces": tuple(pieces), "drafts": drafts})
