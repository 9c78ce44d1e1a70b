"""A turn's prompt: as ServeCore renders it with the model's chat template, or for a server that
renders conversations itself."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from parrot.gateway.conversations.turn import PromptSource, TurnRequest
from parrot.gateway.prompts.answers import AnswerParser
from parrot.gateway.prompts.conversation import (
    answer_parser,
    constrained_calls,
    reasoning_parser,
    transcript_of,
)
from parrot.gateway.prompts.served_chat import (
    Body,
    served_body,
    served_parser,
    served_transcript,
)
from parrot.gateway.prompts.transcript import Transcript
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.prompts.tokenizers import ModelTokenizer


class Rendered(NamedTuple):
    """A prompt and the way of its answers; `conversation` is its server's to render."""

    shown: Transcript
    samplings: Sequence[SamplingConfig]
    make_parser: Callable[[], AnswerParser]
    conversation: Body | None = None


def rendered(
    request: TurnRequest, prompt: PromptSource, tokenizer: ModelTokenizer | None
) -> Rendered:
    """The request's turn with this prompt. Raises `UnsupportedField` and `InvalidRequest`."""
    options, model = request.options, request.model
    make_parser = answer_parser(options, model, tokenizer)
    samplings = constrained_calls(request.samplings, request.calls, model, tokenizer)
    shown = transcript_of(prompt, options, model, tokenizer)
    if request.may_reason:
        make_parser = reasoning_parser(make_parser, shown.text, tokenizer)
    return Rendered(shown, samplings, make_parser)


def served(request: TurnRequest) -> Rendered:
    """The request's turn, whose prompt is messages, for a server that renders it."""
    assert not isinstance(request.prompt, str), request
    body = served_body(request.prompt, request.options, request.calls)
    make_parser = served_parser(request.calls, may_reason=request.may_reason)
    return Rendered(served_transcript(request.prompt, body), request.samplings, make_parser, body)
