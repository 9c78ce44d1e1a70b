"""A turn: a prompt that comes whole, and the answers that are made of it."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parrot.gateway.conversations.endings import Place
from parrot.gateway.prompts.answers import AnswerParser, FirstCallParser
from parrot.gateway.prompts.call_grammars import CallRules
from parrot.gateway.prompts.transcript import Message
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.public import ReadOptions, VarGetResponse
from parrot.protocol.sampling import Logprobs, SamplingConfig
from parrot.serve.graph.nodes import Completion
from parrot.serve.graph.variable import TokenizedText
from parrot.serve.readers import Reads
from parrot.serve.sessions import Session
from parrot.serve.views import value_view

PromptSource = Sequence[Message] | str


@dataclass(frozen=True, slots=True)
class Chain:
    """How a turn is tied to variables of a session: `session_id`, or the program's own.

    `inputs`: var_ids by placeholder. `output`: the unset variable that the answer sets.
    `is_deferred`: nobody waits for the answer; with `criteria` it is made at once, as if somebody
    wanted it so, within `deadline` seconds."""

    session_id: int | None = None
    session_auth: str | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    output: str | None = None
    is_deferred: bool = False
    criteria: PerformanceCriteria | None = None
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A prompt and how to go on from it.

    `prompt`: messages, which the model's chat template renders with `options`, or plain text, which
    may have special tokens in it; `tokens` are its tokens, where the text does not tell them. There
    is an answer for each of `samplings`. `program` names the program that asks. `calls`: what
    answers may call of the tools in `options`. `deadline`: in how many seconds the answers are
    wanted. `prediction`: text that they may repeat. `traceparent`: the span of who asks.
    `is_resumed`: it was accepted before a restart, so that the queue is full does not refuse it."""

    tenant: str
    model: str
    prompt: PromptSource
    samplings: Sequence[SamplingConfig]
    options: Mapping[str, Any] = field(default_factory=dict)
    program: str | None = None
    func_name: str = "chat"
    criteria: PerformanceCriteria = PerformanceCriteria.LATENCY
    calls: CallRules | None = None
    deadline: float | None = None
    chain: Chain | None = None
    tokens: TokenizedText | None = None
    prediction: str = ""
    traceparent: str = ""
    is_resumed: bool = False

    @property
    def may_reason(self) -> bool:
        """Whether answers are not constrained from their first token on."""
        is_constrained = any(sampling.constraint is not None for sampling in self.samplings)
        must_call = self.calls is not None and self.calls.must_call
        return not (isinstance(self.prompt, str) or is_constrained or must_call)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A turn that was submitted. Its answers are made while they are read; cancelling a read, or
    closing a stream, withdraws it. `place`: where its prompt ends; None if nothing continues it.
    `make_parser` makes a parser for each answer. `prefix` says in a line
    whether the prompt shares what the program sent before. `is_kept`: what is not done stays in the
    session, for whoever wants it."""

    session: Session
    request_id: int
    completions: Sequence[Completion]
    place: Place | None
    reads: Reads
    criteria: PerformanceCriteria
    make_parser: Callable[[], AnswerParser]
    prefix: str
    deadline: float | None = None
    is_kept: bool = False

    def parser(self, *, may_call_many: bool = True) -> AnswerParser:
        """For one answer. Unless it `may_call_many` tools, calls after the first are dropped."""
        parser = self.make_parser()
        return parser if may_call_many else FirstCallParser(parser)

    async def read(self, choice: int) -> VarGetResponse:
        """Raises the answer's error."""
        output = self.completions[choice].output
        async with self.session.published():
            await self.reads.value(self.session, output, self._options)
        return value_view(output)

    def stream(self, choice: int) -> AsyncGenerator[str]:
        """The answer's text in deltas. Raises as `read` does."""
        return self.reads.stream(self.session, self.completions[choice].output, self._options)

    def ended(self, choice: int) -> VarGetResponse:
        """An answer that was streamed to its end."""
        return value_view(self.completions[choice].output)

    @property
    def _options(self) -> ReadOptions:
        return ReadOptions(
            session_id=self.session.id, criteria=self.criteria, deadline=self.deadline
        )

    def logprobs(self, choice: int) -> Logprobs | None:
        """How likely the answer's tokens so far were; None unless that is wanted."""
        return self.completions[choice].stats.logprobs

    def cancel(self) -> None:
        """Stop whatever is not done, unless it is kept. Nothing is left of a session that has
        ended."""
        if not self.is_kept and self.request_id in self.session.graph.calls:
            self.session.graph.cancel_call(self.request_id)
