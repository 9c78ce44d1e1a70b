"""A model's way with conversations: how it is shown one, and how its answers call tools."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parrot.protocol.errors import UnsupportedField
from parrot.serve.graph.nodes import TextPiece
from parrot.serve.prompts.answers import AnswerParser, PlainParser, tool_parser
from parrot.serve.prompts.chat import PLAIN_CHAT
from parrot.serve.prompts.encode import encode_prompt
from parrot.serve.prompts.segments import Segment
from parrot.serve.prompts.tokenizers import ModelTokenizer
from parrot.serve.prompts.transcript import Message, render_transcript


def prompt_pieces(
    prompt: Sequence[Message] | str,
    options: Mapping[str, Any],
    model: str,
    tokenizer: ModelTokenizer | None,
) -> list[TextPiece]:
    """The pieces of plain text, or of messages that the chat template renders with `options`.
    Raises `UnsupportedField` if the model has no chat template, and `InvalidRequest`."""
    if isinstance(prompt, str):
        return [TextPiece(prompt)]
    if tokenizer is None:
        return render_transcript(PLAIN_CHAT, prompt)
    if tokenizer.chat is None:
        raise UnsupportedField(f"model `{model}` has no chat template", param="model")
    special = tokenizer.encoder.special_texts
    return render_transcript(tokenizer.chat, prompt, special_texts=special, **options)


async def count_tokens(
    prompt: Sequence[Message] | str,
    options: Mapping[str, Any],
    model: str,
    tokenizer: ModelTokenizer | None,
) -> int:
    """Tokens of the prompt. Raises as `prompt_pieces` does, and `UnsupportedField` if the engines
    of the model take text."""
    if tokenizer is None:
        raise UnsupportedField(f"only its engines know the tokens of `{model}`", param="model")
    pieces = prompt_pieces(prompt, options, model, tokenizer)
    segments = [Segment(piece.kind, piece.text) for piece in pieces]
    return sum(map(len, await encode_prompt(segments, False, tokenizer)))


def answer_parser(
    options: Mapping[str, Any], model: str, tokenizer: ModelTokenizer | None
) -> Callable[[], AnswerParser]:
    """Makes parsers of answers. Raises `UnsupportedField` if there are tools and it is not known
    how the model calls them."""
    if not options.get("tools"):
        return PlainParser
    chat = None if tokenizer is None else tokenizer.chat
    parser = None if chat is None else tool_parser(chat.source)
    if parser is None:
        raise UnsupportedField(f"it is not known how `{model}` calls tools", param="tools")
    return parser
