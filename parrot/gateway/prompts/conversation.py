"""A model's way with conversations: how it is shown one, and how its answers call tools."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from parrot.gateway.prompts.answers import AnswerParser, PlainParser
from parrot.gateway.prompts.call_families import Family, tool_family
from parrot.gateway.prompts.call_grammars import CallRules, call_grammar
from parrot.gateway.prompts.reasoning import with_reasoning
from parrot.gateway.prompts.transcript import (
    Message,
    Transcript,
    render_transcript,
    with_system_first,
)
from parrot.protocol.errors import InvalidRequest, PromptTooLong, UnsupportedField
from parrot.protocol.sampling import CONSTRAINTS, SamplingConfig
from parrot.serve.graph.nodes import PieceKind
from parrot.serve.graph.variable import TokenizedText
from parrot.serve.prompts.chat import PLAIN_CHAT
from parrot.serve.prompts.encode import encode_prompt, require_chars
from parrot.serve.prompts.segments import Segment
from parrot.serve.prompts.tokenizers import ModelTokenizer, Style

_PART = 2048  # characters
_MAX_CHARS = 2**23  # of a prompt: no model has room for two million tokens

FindTokenizer = Callable[[str], ModelTokenizer | None]
"""The tokenizer of a model, None if its engines take text. Raises `NotFound` if it has none."""

TokenPrompt = tuple[str, TokenizedText | None]
"""A prompt's text, and its tokens where the text does not tell them."""


def transcript_of(
    prompt: Sequence[Message] | str,
    options: Mapping[str, Any],
    model: str,
    tokenizer: ModelTokenizer | None,
) -> Transcript:
    """The prompt of plain text, or of messages that the chat template renders with `options`.
    Raises `UnsupportedField` if the model has no chat template, `PromptTooLong` for what is longer
    than any model's prompt, and `InvalidRequest`."""
    texts = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt]
    num_chars = sum([len(text) for text in texts if isinstance(text, str)])
    if num_chars > _MAX_CHARS:
        raise PromptTooLong(f"the prompt has {num_chars} characters; the limit is {_MAX_CHARS}")
    if isinstance(prompt, str):
        ends = [(end, PieceKind.CONSTANT) for end in _part_ends(prompt)]
        return Transcript(prompt, lambda *_: ends)
    if tokenizer is None:
        return render_transcript(PLAIN_CHAT, prompt)
    if tokenizer.chat is None:
        raise UnsupportedField(f"model `{model}` has no chat template", param="model")
    special = tokenizer.encoder.special_texts
    shown = prompt if tokenizer.chat.takes_system_anywhere else with_system_first(prompt)
    return render_transcript(
        tokenizer.chat,
        shown,
        special_texts=special,
        are_as_sent=len(shown) == len(prompt),
        **options,
    )


def require_fits(prompt: str, tokenizer: ModelTokenizer | None, limit: int | None) -> None:
    """Raise `PromptTooLong` for a prompt that cannot be less than `limit` tokens (None: any)."""
    if limit is not None:
        require_chars(len(prompt), tokenizer, limit)


def _part_ends(text: str) -> Iterator[int]:
    """Where a long text is cut, so that the next prompt that begins with it shares its tokens and
    its KV. The parts have the same tokens as the whole."""
    at = text.find("\n", _PART)
    while 0 <= at < len(text) - 1:
        # Tokens of all families end behind such a newline.
        is_end = at > 0 and text[at + 1].isalnum() and not text[at - 1].isspace()
        if is_end:
            yield at + 1
        at = text.find("\n", at + 1 + is_end * _PART)
    yield len(text)


async def prompt_tokens(
    prompt: Sequence[Message] | str,
    options: Mapping[str, Any],
    model: str,
    tokenizer: ModelTokenizer | None,
) -> list[int]:
    """The ids of the prompt. Raises as `transcript_of` does, and `UnsupportedField` if the engines
    of the model take text."""
    if tokenizer is None:
        raise UnsupportedField(f"only its engines know the tokens of `{model}`", param="model")
    pieces = transcript_of(prompt, options, model, tokenizer).pieces()
    segments = [Segment(piece.kind, piece.text) for piece in pieces]
    units = await encode_prompt(segments, False, tokenizer)
    parts = [ids for ids in units if not isinstance(ids, str)]
    return list(chain.from_iterable(parts))  # not one by one in Python: there may be millions


async def prompt_of_tokens(
    ids: Sequence[int], model: str, tokenizer: ModelTokenizer | None
) -> TokenPrompt:
    """A prompt of exactly these tokens. Its text has that of special ones, but for a first BOS
    token. Raises `UnsupportedField` if the engines of the model take text, and `InvalidRequest` for
    a token that the model has not."""
    if tokenizer is None:
        message = f"the engines of `{model}` take text: give the prompt as text"
        raise UnsupportedField(message, param="prompt")
    encoder = tokenizer.encoder
    if (largest := max(ids)) >= encoder.num_tokens:
        message = f"token id {largest} is outside of the vocabulary of {encoder.num_tokens}"
        raise InvalidRequest(message, param="prompt")
    given = tuple(ids)
    shown = given[1:] if given[0] == tokenizer.bos else given
    text = await asyncio.to_thread(encoder.decode, shown, special=True)
    usual = await encoder.encode(text, Style(special=True, first=True))
    is_usual = tokenizer.with_bos(usual) == given
    return text, None if is_usual else TokenizedText(tokenizer.tokenizer_id, given)


async def text_of_tokens(ids: Sequence[int], model: str, tokenizer: ModelTokenizer | None) -> str:
    """Their text, without that of special tokens. Raises `UnsupportedField` if the engines of the
    model take text."""
    if tokenizer is None:
        raise UnsupportedField(f"only its engines know the tokens of `{model}`", param="model")
    return await asyncio.to_thread(tokenizer.encoder.decode, ids)


def answer_parser(
    options: Mapping[str, Any], model: str, tokenizer: ModelTokenizer | None
) -> Callable[[], AnswerParser]:
    """Makes parsers of answers. Raises `UnsupportedField` if there are tools and it is not known
    how the model calls them."""
    tools = options.get("tools")
    if not tools:
        return PlainParser
    functions = [tool.get("function", {}) for tool in tools]
    return partial(_family(model, tokenizer).make_parser, functions)


def reasoning_parser(
    make_parser: Callable[[], AnswerParser], text: str, tokenizer: ModelTokenizer | None
) -> Callable[[], AnswerParser]:
    """Makes parsers of answers that may begin with reasoning, behind the prompt `text`."""
    chat = None if tokenizer is None else tokenizer.chat
    return make_parser if chat is None else with_reasoning(make_parser, chat.source, text)


def constrained_calls(
    samplings: Sequence[SamplingConfig],
    rules: CallRules | None,
    model: str,
    tokenizer: ModelTokenizer | None,
) -> Sequence[SamplingConfig]:
    """The samplings of answers whose calls obey the rules; what constrains them already is for
    answers that call nothing. Raises `UnsupportedField` and `InvalidRequest`."""
    if rules is None:
        return samplings
    return [_constrained(sampling, rules, model, tokenizer) for sampling in samplings]


def _constrained(
    sampling: SamplingConfig, rules: CallRules, model: str, tokenizer: ModelTokenizer | None
) -> SamplingConfig:
    if not rules.constrains and sampling.json_schema is None:
        return sampling
    if sampling.constraint not in (None, "json_schema") and not rules.must_call:
        raise UnsupportedField(
            f"an answer with `{sampling.constraint}` cannot call strict tools", param="tools"
        )
    schema = sampling.json_schema
    if isinstance(schema, str):
        raise UnsupportedField("with tools a schema must be an object", param="response_format")
    markup = _family(model, tokenizer).markup
    if markup is None:
        raise UnsupportedField(f"calls of tools by `{model}` cannot be enforced", param="tools")
    grammar = call_grammar(markup, rules, schema)
    return sampling.model_copy(update=_FREE | {"grammar": grammar})


_FREE = dict.fromkeys(CONSTRAINTS)


def _family(model: str, tokenizer: ModelTokenizer | None) -> Family:
    chat = None if tokenizer is None else tokenizer.chat
    family = None if chat is None else tool_family(chat.source)
    if family is None:
        raise UnsupportedField(f"it is not known how `{model}` calls tools", param="tools")
    return family
