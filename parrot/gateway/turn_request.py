"""Values of a turn: the request of a chat API, and its rendered prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import SecretStr

from parrot.gateway.answers import AnswerParser
from parrot.gateway.transcript import (
    Body,
    MarkedPrompt,
    Message,
    Transcript,
)
from parrot.protocol.call_grammar import CallRules
from parrot.protocol.errors import ParrotError
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.graph.nodes import TokenizedText

PromptSource = Sequence[Message] | str


@dataclass(frozen=True, slots=True)
class TurnChain:
    """The session variables in a turn's prompt and the variable of its answer."""

    session_id: int | None = None  # None: the program's own session
    session_auth: str | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)  # var_ids by placeholder
    output: str | None = None  # the unset variable that the answer sets; None: a new one
    is_deferred: bool = False  # the request does not wait for the answer
    criteria: PerformanceCriteria | None = None  # run a deferred turn now, as if it had a reader
    deadline: float | None = None  # seconds, for `criteria`


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A prompt and the settings of its answers."""

    tenant: str
    model: str
    # Messages, which the chat template renders with `options`; or text, with special tokens in it.
    prompt: PromptSource
    samplings: Sequence[SamplingConfig]  # one for each answer
    options: Mapping[str, Any] = field(default_factory=dict)
    program: str | None = None  # the program's name
    client: str = ""  # name of the client; empty: unknown
    func_name: str = "chat"
    criteria: PerformanceCriteria = PerformanceCriteria.LATENCY
    calls: CallRules | None = None  # rules for calls of the tools in `options`
    deadline: float | None = None  # seconds until the answers are needed
    chain: TurnChain | None = None
    tokens: TokenizedText | None = None  # the prompt's tokens, if its text encodes differently
    prediction: str = ""  # text that the answers may repeat
    traceparent: str = ""  # the caller's span
    request_id: str = ""  # of the client's request
    client_key: SecretStr | None = None  # for servers that get the client's key
    # For servers behind engines: fields that Parrot does not know, and known fields that have no
    # effect in Parrot.
    unknown: Mapping[str, Any] = field(default_factory=dict)
    ignored: Callable[[], Mapping[str, Any]] = dict
    refused: Sequence[ParrotError] = ()  # errors for content that only such servers accept
    is_resumed: bool = False  # accepted before a restart, so a full queue does not reject it


class Rendered(NamedTuple):
    """A rendered prompt and the parsers of its answers. `conversation`: the body for a server that
    renders the messages itself. `messages`: with hashes of images, audio and files."""

    messages: Sequence[Message]  # none for a plain text
    shown: Transcript
    samplings: Sequence[SamplingConfig]
    make_parser: Callable[[], AnswerParser]
    conversation: Body | None = None


class Prepared(NamedTuple):
    """A turn that can be submitted."""

    request: TurnRequest
    rendered: Rendered
    marked: MarkedPrompt | None  # the prompt of a chained turn, with marks for its variables
