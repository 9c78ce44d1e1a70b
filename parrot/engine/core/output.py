"""From sampled tokens to text: incremental detokenization, stop rules, stream chunks."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from parrot.engine.core.steps import TokenScores
from parrot.engine.grammar.constraint import Constraint
from parrot.protocol.engine_api import (
    MOST_IDS,
    FinishReason,
    OutputPart,
    StreamChunk,
    TokenizerResponse,
)
from parrot.protocol.sampling import (
    NEUTRAL_SAMPLING,
    DefaultSampling,
    Logprobs,
    ResolvedSampling,
    SamplingConfig,
)

if TYPE_CHECKING:
    from parrot.engine.grammar.compiler import GrammarCompiler

_MAX_REPORTED_TOKENS = 131_072  # Most tokens in one heartbeat, which keeps it below 1 MiB.
_PART_OVERHEAD_TOKENS = 16  # Size of an output's entry in a heartbeat without tokens, in tokens.
_REPLACEMENT = "\ufffd"  # A decoder's output for bytes that are not valid UTF-8, or not yet.
# Special tokens with which some models call tools. They are part of an output's text.
_TOOL_CALL_TOKENS = frozenset(
    {
        *("<start_function_call>", "<end_function_call>", "<escape>"),  # FunctionGemma
        *("<|tool_call>", "<tool_call|>", '<|"|>'),  # Gemma 4
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),  # Kimi K2
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    }
)


class Detokenizer:
    """Turns tokens into text, without special tokens.

    The start of an incomplete character is held back, and dropped if the character is never
    completed."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        """`before`: earlier tokens. Many decoders drop a space at the start of a text."""
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []
        self._shown: list[int] = []  # The tokens of the last text, on which the next may depend.
        for token_id in before:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Add a token and return the text that it completes, which may be empty."""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001 - the library raises nothing narrower
            return self._restart()
        if text is None:
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """Return the complete characters that were held back. No token may follow."""
        if not self._pending:
            return ""
        shown = self._tokenizer.decode(self._shown, skip_special_tokens=True)
        text = decode(self._tokenizer, self._shown + self._pending)
        self._pending.clear()
        return text[len(shown) :]

    def _restart(self) -> str:
        """Decode the pending tokens alone, after the library has failed on invalid bytes."""
        text = decode(self._tokenizer, self._pending)
        self._pending.clear()
        self._shown.clear()
        self._stream = DecodeStream(skip_special_tokens=True)
        return text


def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of all tokens, equal to the concatenated text of a `Detokenizer`."""
    return tokenizer.decode(token_ids, skip_special_tokens=True).rstrip(_REPLACEMENT)


class StopStrings:
    """Finds the first stop string in a streamed text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self.held = ""  # Text at the end that may be the start of a stop string.
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Add text, and return the text that certainly precedes any stop string.

        Must not be called after a stop string was found."""
        text = self.held + piece
        hits = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            first, self.found = min(hits, key=itemgetter(0))
            self.held = ""
            return text[:first]
        cut = len(text) - max(self._overlap(text, stop) for stop in self._stops)
        self.held = text[cut:]
        return text[:cut]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The length of the longest suffix of `text` that is a prefix of `stop`."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)

    def flush(self) -> str:
        held, self.held = self.held, ""
        return held


@dataclass(frozen=True, slots=True)
class Language:
    """A model's tokenizer, grammars and sampling defaults."""

    response: TokenizerResponse  # The tokenizer as clients receive it.
    tokenizer: Tokenizer  # Tool-call tokens are not special here.
    grammars: "GrammarCompiler | None" = None  # None: outputs cannot be constrained.
    default_sampling: DefaultSampling = NEUTRAL_SAMPLING  # For the fields that a request omits.

    @classmethod
    def of(
        cls,
        response: TokenizerResponse,
        grammars: "GrammarCompiler | None" = None,
        default_sampling: DefaultSampling = NEUTRAL_SAMPLING,
    ) -> "Language":
        text = response.tokenizer_json
        if any(markup in text for markup in _TOOL_CALL_TOKENS):
            definition = json.loads(text)
            for token in definition.get("added_tokens") or ():
                token["special"] = token["special"] and token["content"] not in _TOOL_CALL_TOKENS
            text = json.dumps(definition)
        return cls(response, Tokenizer.from_str(text), grammars, default_sampling)

    @property
    def tokenizer_id(self) -> str:
        return hashlib.sha256(self.response.tokenizer_json.encode()).hexdigest()

    def stop_ids(self, sampling: SamplingConfig) -> Collection[int]:
        if sampling.ignore_tokenizer_eos:
            return sampling.stop_token_ids
        return (*self.response.special_ids.eos, *sampling.stop_token_ids)


class Generation:
    """The output of one Generate request: tokens, finish reason and text.

    With stop strings, text is rendered for each token. For a stream it is rendered for each chunk.
    Otherwise it is rendered once, at the end."""

    def __init__(
        self,
        sampling: ResolvedSampling,
        seed: int,
        language: Language,
        stream: bool,
        constraint: Constraint | None = None,
        resumed_ids: Sequence[int] = (),
    ) -> None:
        self.resumed_ids = resumed_ids  # The first tokens, which another engine has generated.
        self.sampling = sampling
        self.seed = seed
        self.output_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.max_tokens = sampling.max_gen_length
        self.constraint = constraint
        self.logprobs = None if sampling.logprobs is None else Logprobs(1 + sampling.logprobs)
        self._language = language
        self._stop_ids = language.stop_ids(sampling)
        if constraint is not None:
            self._stop_ids = (*self._stop_ids, *constraint.end_ids)
        stops = sampling.stop_strings
        self._stops = StopStrings(stops) if stops else None
        self.is_streamed = stream  # Whether the text is taken in chunks.
        is_seen = stream or self._stops is not None or bool(resumed_ids)
        self._detokenizer = Detokenizer(language.tokenizer, resumed_ids) if is_seen else None
        self._num_rendered = 0
        self._pieces: list[str] = []  # The text so far, without text that is held back.
        self._num_streamed_pieces = 0
        self._num_streamed_ids = 0
        self._num_hidden = 0  # Tokens at the end that are not part of the text.

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None if none did."""
        return None if self._stops is None else self._stops.found

    @property
    def num_left(self) -> int:
        """The number of tokens that may still be generated."""
        return self.max_tokens - len(self.output_ids)

    def is_unaffected_by(self, token_ids: Collection[int]) -> bool:
        """Whether tokens in `token_ids` can be added without any check.

        None of them ends the output, its text is needed only at the end, and it has no log
        probabilities."""
        if self._detokenizer is not None or self.logprobs is not None:
            return False
        return not any(i in token_ids for i in self._stop_ids)

    def push_all(self, token_ids: Sequence[int]) -> None:
        """Add fewer than `num_left` tokens that need no check (see `is_unaffected_by`)."""
        self.output_ids += token_ids

    def push(self, token_id: int, scores: TokenScores | None = None) -> None:
        """Add the next sampled token, and set `finish_reason` if it is the last.

        `scores` is given if log probabilities were requested. Raises `InvalidRequest` if the output
        cannot follow its grammar."""
        self.output_ids.append(token_id)
        if self.logprobs is not None and scores is not None:
            self.logprobs.add(*scores)
        if token_id in self._stop_ids:
            self.finish_reason = FinishReason.STOP
            self._num_hidden = 1
        else:
            if self.constraint is not None:
                self._take_constrained(self.constraint, token_id)
            if self._stops is not None:
                self._render()
        if self.finish_reason is None and len(self.output_ids) >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None:
            self._end_text()

    def _take_constrained(self, constraint: Constraint, token_id: int) -> None:
        constraint.take(len(self.output_ids) - 1, token_id)
        if constraint.is_complete:
            self.finish_reason = FinishReason.STOP

    def _end_text(self) -> None:
        """Append the text that was held back, unless a stop string was found."""
        if self._detokenizer is None or self.stop_string is not None:
            return
        self._render()
        self._add_text(self._detokenizer.flush())
        if self._stops is not None and self.stop_string is None:
            self._pieces.append(self._stops.flush())

    def _render(self) -> None:
        """Render the text of all tokens so far."""
        if self._detokenizer is None:
            return
        end = len(self.output_ids) - self._num_hidden
        for token_id in self.output_ids[self._num_rendered : end]:
            self._add_text(self._detokenizer.push(token_id))
        self._num_rendered = end

    def _add_text(self, piece: str) -> None:
        if self._stops is not None:
            piece = self._stops.push(piece)
            if self.stop_string is not None:
                self.finish_reason = FinishReason.STOP
        if piece:
            self._pieces.append(piece)

    def start_streaming(self) -> StreamChunk | None:
        """Render text for `take_chunk` from now on.

        Returns the text of all earlier chunks. If the output was not streamed, returns the text so
        far."""
        if self._detokenizer is None:
            self._detokenizer = Detokenizer(self._language.tokenizer)
        if not self.is_streamed:
            self.is_streamed = True
            return self.take_chunk()
        return self._chunk(self._pieces[: self._num_streamed_pieces], 0, self._num_streamed_ids)

    def take_chunk(self) -> StreamChunk | None:
        """The tokens since the last chunk and exactly their text.

        None while the text ends inside a character or may be the start of a stop string."""
        self._render()
        pieces = self._pieces[self._num_streamed_pieces :]
        held = "" if self._stops is None else self._stops.held
        if self.finish_reason is None and (held or not pieces):
            return None
        start = self._num_streamed_ids
        self._num_streamed_pieces = len(self._pieces)
        self._num_streamed_ids = len(self.output_ids)
        return self._chunk(pieces, start, self._num_streamed_ids)

    def _chunk(self, pieces: Sequence[str], start: int, end: int) -> StreamChunk | None:
        ids, text = self.output_ids[start:end], "".join(pieces)
        if not (ids or text):
            return None
        logprobs = None if self.logprobs is None else self.logprobs.part(start, end)
        return StreamChunk.model_construct(ids=ids, text=text, logprobs=logprobs)

    def text(self) -> str:
        """The whole text, without the stop token or stop string."""
        if self._detokenizer is not None:
            return "".join(self._pieces)
        ids = self.output_ids[: len(self.output_ids) - self._num_hidden]
        return decode(self._language.tokenizer, ids)


def unreported_outputs(
    generations: Iterable[tuple[int, Generation]], reported: Mapping[int, int]
) -> list[OutputPart]:
    """The tokens of each output that is not streamed, after the first `reported` ones.

    The newest token is left out, because it may end the output. At most `_MAX_REPORTED_TOKENS` are
    returned. May be called from any thread."""
    parts, tokens_left = [], _MAX_REPORTED_TOKENS
    for context_id, generation in generations:
        if generation.is_streamed:
            continue
        start = reported.get(context_id, 0)
        ids = generation.output_ids[start:-1][: min(tokens_left, MOST_IDS)]
        tokens_left = max(0, tokens_left - len(ids) - _PART_OVERHEAD_TOKENS) if ids else tokens_left
        parts.append(OutputPart.of(context_id, start, ids))
    return parts


Follower = Callable[[StreamChunk | None], None]
"""Receives all chunks of an output, and then None."""


class Followers:
    """Followers of outputs, by the context of the output.

    A follower may be added before the output is requested. Then it waits for the output."""

    def __init__(
        self,
        find: Callable[[int], Generation | None],
        send: Callable[[Callable[..., None], Any], None],
    ) -> None:
        """`find` returns the output that a context generates. `send` calls a function later."""
        self._find = find
        self._send = send
        self.by_context: dict[int, list[Follower]] = {}  # Read-only for other classes.

    def add(self, context_id: int, follower: Follower) -> None:
        self.by_context.setdefault(context_id, []).append(follower)
        if (generation := self._find(context_id)) is not None:
            self._start(generation, [follower])

    def remove(self, context_id: int, follower: Follower) -> None:
        followers = self.by_context.get(context_id, [])
        if follower in followers:
            followers.remove(follower)
        if not followers:
            self.by_context.pop(context_id, None)

    def start(self, context_id: int, generation: Generation) -> None:
        """Start the followers of a new output, unless an earlier output is not finished."""
        followers = self.by_context.get(context_id)
        if followers and self._find(context_id) is generation:
            self._start(generation, followers)

    def send(self, context_id: int, chunk: StreamChunk | None) -> None:
        """Send a chunk to all followers of the context's output. None removes the followers."""
        of = self.by_context
        for follower in (of.pop if chunk is None else of.get)(context_id, ()):
            self._send(follower, chunk)

    def _start(self, generation: Generation, followers: Sequence[Follower]) -> None:
        if (chunk := generation.start_streaming()) is not None:
            for follower in followers:
                self._send(follower, chunk)
