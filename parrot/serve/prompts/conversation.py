"""A model's way with conversations: how it is shown one, and how its answers call tools."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parrot.protocol.errors import UnsupportedField
from parrot.serve.graph.nodes import TextPiece
from parrot.serve.prompts.answers import AnswerParser, PlainParser, tool_parser
from parrot.serve.prompts.chat import PLAIN_CHAT
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
