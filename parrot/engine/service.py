"""The interface between the engine's HTTP server and an engine of any type."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from parrot.protocol.engine_api import (
    EmbedRequest,
    EmbedResponse,
    EngineInfo,
    FillRequest,
    FillResponse,
    GenerateRequest,
    GenerateResponse,
    RuntimeInfo,
    ScoreResponse,
    StreamChunk,
    TokenizerResponse,
)
from parrot.protocol.engine_client import OnChunk


class ServiceState(StrEnum):
    LOADING = "loading its model"
    READY = "ready"
    CLOSED = "shutting down"
    LOST = "lost"  # no request can ever be served again: the process should end


class EngineService(Protocol):
    """Used from one event loop. Every refusal or failure of a request is a `ParrotError`.

    Cancelling a verb, or closing the iterator of `generate_stream`, aborts the job within one
    engine step and leaves its context as far as it got."""

    async def start(self) -> None:
        """Load the model and warm up. Called once, before anything else; may take minutes."""
        ...

    def state(self) -> ServiceState: ...

    async def prepare(self, request: GenerateRequest) -> None:
        """Do what takes a while and need not wait for the request's turn, so that `generate` can
        take it at once. Raises what `generate` would."""
        ...

    async def fill(self, request: FillRequest) -> FillResponse: ...

    async def generate(
        self, request: GenerateRequest, on_chunk: OnChunk | None = None
    ) -> GenerateResponse:
        """`on_chunk` is given the pieces of the output as they are generated, on the event loop."""
        ...

    def generate_stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[StreamChunk | GenerateResponse]:
        """Chunks as they are generated; the last item, always, is the whole response. The request
        is checked when iteration begins."""
        ...

    def follow(self, context_id: int) -> AsyncGenerator[StreamChunk]:
        """The output that `generate` makes on a context, from its first token on, until it ends.
        If it has not begun yet it is waited for. Raises `UnsupportedField` if this engine gets its
        outputs whole."""
        ...

    async def read(self, request: EmbedRequest) -> EmbedResponse | ScoreResponse:
        """Embed texts; or score them, for a `ScoreRequest`. Raises `UnsupportedField` if this
        engine does not."""
        ...

    async def free_contexts(self, context_ids: Sequence[int]) -> int:
        """Abort the jobs of these contexts and forget them; returns the tokens they held. Unknown
        ids count 0."""
        ...

    async def reset(self) -> None:
        """Abort every job and free every context: the ServeCore that owned them is gone, and the
        next one hands out the same ids again. Cached KV stays."""
        ...

    def runtime_info(self, told: Mapping[int, int] | None = None) -> RuntimeInfo:
        """With the `outputs` under way in these contexts that nobody takes as they come, behind the
        tokens that were `told`: how many, by contexts. The newest may be left out. None of them if
        that is None, nor of an engine of text."""
        ...

    def engine_info(self) -> EngineInfo:
        """Return the facts to register with; valid after `start`."""
        ...

    def tokenizer(self) -> TokenizerResponse | None:
        """None when the engine's contexts are text."""
        ...

    def check_integrity(self) -> None:
        """Recount blocks, contexts and jobs; an AssertionError tells what does not add up. Call
        it only between steps."""
        ...

    async def close(self) -> None:
        """Fail what is unfinished with `Unavailable` and stop. May be called twice."""
        ...
