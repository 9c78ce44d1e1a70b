"""A sink for requests that a test submits to an engine core directly."""

from parrot.engine.core.jobs import Outcome, Response
from parrot.protocol.engine_api import GenerateResponse, StreamChunk
from parrot.protocol.errors import ParrotError


class Answer:
    """Keeps the chunks and the outcome, and checks that there is only one outcome."""

    def __init__(self) -> None:
        self.chunks: list[StreamChunk] = []
        self.response: Response | None = None
        self.error: ParrotError | None = None

    @property
    def has_ended(self) -> bool:
        return self.response is not None or self.error is not None

    @property
    def text(self) -> str:
        assert isinstance(self.response, GenerateResponse), self.error
        return self.response.generated_text

    def __call__(self, outcome: Outcome) -> None:
        assert not self.has_ended
        if isinstance(outcome, StreamChunk):
            self.chunks.append(outcome)
        elif isinstance(outcome, ParrotError):
            self.error = outcome
        else:
            self.response = outcome
