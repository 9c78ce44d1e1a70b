"""A live engine, and how others see it."""

from dataclasses import dataclass

from parrot.protocol.engine_api import EngineInfo, RuntimeInfo
from parrot.protocol.engine_client import EngineClient
from parrot.serve.contexts.kv_log import KvCounts
from parrot.serve.prompts.tokenizers import ModelTokenizer

Address = tuple[str, str, int]


def address(info: EngineInfo) -> Address:
    """The name and place by which an engine that registers again is known."""
    return (info.engine_name, info.host, info.port)


@dataclass(slots=True, eq=False)
class Engine:
    """A registered engine, alive until it is lost. `tokenizer` is None if its contexts are text.
    `last_progress`: the last heartbeat by which it had done something, or had nothing to do."""

    id: int
    info: EngineInfo
    client: EngineClient
    tokenizer: ModelTokenizer | None
    last_seen: float
    last_progress: float
    runtime: RuntimeInfo | None = None
    is_alive: bool = True


@dataclass(frozen=True, slots=True)
class EngineView:
    """State of an engine as shown to others. Tokens are characters for engines whose contexts are
    text; `silent_s`: since its last sign of life."""

    id: int
    info: EngineInfo
    runtime: RuntimeInfo | None
    num_running: int
    num_contexts: int
    num_tokens: int
    silent_s: float
    kv: KvCounts
