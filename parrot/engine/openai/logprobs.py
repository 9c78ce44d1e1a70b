"""Log probabilities in the formats of OpenAI's two endpoints. Their exact meaning, such as before
or after temperature, depends on the foreign server."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from parrot.protocol.errors import UnsupportedField
from parrot.protocol.sampling import Logprobs, SamplingConfig

_NEVER = -9999.0  # OpenAI's log probability for tokens of negligible probability.
_BYTES = re.compile(r"bytes:((?:\\x[0-9a-fA-F]{2})+)")

_Scored = tuple[bytes, float | None]
_Row = tuple[_Scored, Sequence[_Scored]]


class _Likely(BaseModel):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None

    def scored(self) -> _Scored:
        try:
            exact = None if self.bytes is None else bytes(self.bytes)
        except ValueError:
            exact = None
        return self.token.encode() if exact is None else exact, self.logprob


class _Entry(_Likely):
    top_logprobs: list[_Likely] | None = None


class ChoiceLogprobs(BaseModel):
    """Chats have `content`. Completions have the other fields."""

    content: list[_Entry] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None


def prompt_logprobs(given: ChoiceLogprobs | None, num_tokens: int, num_top: int) -> Logprobs:
    """Log probabilities of an echoed prompt's tokens. The first token has none and gets 0. Raises
    `UnsupportedField` if the server did not return log probabilities of the prompt."""
    found, rows = AnswerLogprobs(num_top), list(() if given is None else _rows(given))
    if not num_tokens or len(rows) < num_tokens or rows[0][0][1] is not None:
        text = "the server behind this engine does not return log probabilities of prompts"
        raise UnsupportedField(text, param="echo")
    found.add_rows([((rows[0][0][0], 0.0), ()), *rows[1:num_tokens]])
    assert found.whole is not None
    return found.whole


def logprob_fields(sampling: SamplingConfig, *, is_chat: bool) -> dict[str, Any]:
    """The request fields that ask for log probabilities. Completions ask for at least 1, because
    some servers treat 0 as "no"."""
    if sampling.logprobs is None:
        return {}
    if not is_chat:
        return {"logprobs": max(1, sampling.logprobs)}
    top = {"top_logprobs": sampling.logprobs} if sampling.logprobs else {}
    return {"logprobs": True, **top}


class AnswerLogprobs:
    """Collects the log probabilities of one answer, chunk by chunk. `whole` is None if they were
    not requested."""

    def __init__(self, num_top: int | None) -> None:
        self._width = 1 + (num_top or 0)
        self._told = 0
        self.whole = None if num_top is None else self._empty()

    def add(self, given: ChoiceLogprobs | None) -> None:
        """Add the log probabilities of a chunk. No effect if they were not requested."""
        if given is not None:
            self.add_rows(_rows(given))

    def add_rows(self, rows: Iterable[_Row]) -> None:
        if self.whole is None:
            return
        for chosen, likely in rows:
            ordered = sorted(likely, key=lambda one: -_value(one[1]))[: self._width - 1]
            row = [chosen, *ordered]
            missing = self._width - len(row)
            table = self.whole.tokens
            assert isinstance(table, list), "the table is the server's own"
            ids = range(len(table), len(table) + len(row))
            table += [token for token, _ in row]
            values = [_value(logprob) for _, logprob in row]
            self.whole.add([*ids, *[-1] * missing], [*values, *[_NEVER] * missing])

    def part(self) -> Logprobs | None:
        """The rows since the last call. None without rows."""
        if not self.whole:
            return None
        told, self._told = self._told, len(self.whole)
        part = self._empty()
        part.extend(self.whole.part(told))
        return part

    def of_text(self, text: str) -> Logprobs | None:
        """All rows whose tokens are in `text`, without the stop string or stop token at the end.
        None if the server sent no log probabilities."""
        found, ends = self.whole, text.encode()
        if not found:
            return None
        tokens = [found.tokens[i] if found.tokens else b"" for i in found.ids[:: self._width]]
        size, num = sum(map(len, tokens)), len(tokens)
        while num and size - len(tokens[num - 1]) >= len(ends):
            if tokens[num - 1] and ends.endswith(tokens[num - 1]):
                break  # The token is in the text. The server stripped white space elsewhere.
            num -= 1
            size -= len(tokens[num])
        return found.part(0, num)

    def _empty(self) -> Logprobs:
        return Logprobs(self._width, tokens=list[bytes]())


def _rows(given: ChoiceLogprobs) -> Iterator[_Row]:
    """Yield each token with the most likely tokens at its position."""
    for entry in given.content or ():
        yield entry.scored(), [one.scored() for one in entry.top_logprobs or ()]
    tokens, values = given.tokens or [], given.token_logprobs or []
    likely: Iterable[dict[str, float | None] | None] = given.top_logprobs or [None] * len(tokens)
    for token, value, others in zip(tokens, values, likely, strict=False):
        named = [(_bytes(text), logprob) for text, logprob in (others or {}).items()]
        yield (_bytes(token), value), named


def _bytes(token: str) -> bytes:
    """The bytes of a token of /completions. A token that is a part of a character has the form
    `bytes:\\xe2\\x82`."""
    found = _BYTES.fullmatch(token)
    return token.encode() if found is None else bytes.fromhex(found[1].replace("\\x", ""))


def _value(logprob: float | None) -> float:
    return _NEVER if logprob is None else logprob
