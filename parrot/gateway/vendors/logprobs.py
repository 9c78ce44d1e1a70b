"""Log probabilities of answers in OpenAI's two formats.

chat completions, responses    [{"token": "Hi", "bytes": [72, 105], "logprob": -0.1,
                                 "top_logprobs": [{"token": ..., "bytes": ..., "logprob": ...}]}]
completions                    {"tokens": ["Hi"], "token_logprobs": [-0.1],
                                "top_logprobs": [{"Hi": -0.1, ...}], "text_offset": [0]}"""

import asyncio
from collections.abc import Sequence
from itertools import chain
from typing import Any

import orjson

from parrot.gateway.turns import Turn
from parrot.protocol.sampling import Logprobs
from parrot.serve.readers import SLICE, ScoredToken, scored_tokens

Json = dict[str, Any]
Entry = orjson.Fragment

_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class LogprobsReader:
    """Reads the log probabilities of one streamed answer. Each token is returned with the text that
    it completes."""

    def __init__(self, turn: Turn, choice: int) -> None:
        self._turn = turn
        self._choice = choice
        self._num_taken = 0
        self._num_bytes = 0  # UTF-8 bytes of the returned tokens
        self._num_shown = 0  # UTF-8 bytes of the text that was passed in

    async def take(self, text: str) -> list[ScoredToken]:
        """The log probabilities that belong to the next `text`; empty if none were requested."""
        found = self._turn.logprobs(self._choice)
        if found is None or found.tokens is None:
            return []
        self._num_shown += len(text.encode())
        taken: list[ScoredToken] = []
        async for scored in scored_tokens(found, self._num_taken):
            if self._num_bytes >= self._num_shown:
                break
            taken.append(scored)
            self._num_bytes += len(scored.token)
        self._num_taken += len(taken)
        return taken

    async def pieces(self, text: str) -> list[tuple[str, list[ScoredToken]]]:
        """The next `text`, split at its tokens' ends, with the tokens that end in each part. The
        parser may assign each part to a different item, such as reasoning or the answer. Without
        log probabilities the text stays whole."""
        at = self._num_bytes - self._num_shown  # where the next token begins in `text`
        scored = await self.take(text)
        if len(scored) < 2:
            return [(text, scored)]
        data, start = text.encode(), 0
        pieces: list[tuple[str, list[ScoredToken]]] = [("", [])]
        for one in scored:
            at += len(one.token)
            pieces[-1][1].append(one)
            if start < at < len(data) and data[at] & 0xC0 != 0x80:  # a UTF-8 character begins here
                pieces[-1] = (data[start:at].decode(), pieces[-1][1])
                pieces.append(("", []))
                start = at
        pieces[-1] = (data[start:].decode(), pieces[-1][1])
        return pieces

    async def rest(self, *, with_ending: bool = False) -> list[ScoredToken]:
        """The remaining log probabilities of a finished answer, `with_ending` also of the tokens
        that ended it."""
        found = self._turn.logprobs(self._choice)
        if found is None or found.tokens is None:
            return []
        rest = [scored async for scored in scored_tokens(found, self._num_taken)]
        if with_ending and found.ending is not None:
            rest += [scored async for scored in scored_tokens(found.ending)]
        return rest


async def entries_of(scored: Sequence[ScoredToken]) -> list[Entry]:
    """The tokens in the format of chat completions."""
    entries: list[Entry] = []
    for first in range(0, len(scored), SLICE):
        if first:
            await asyncio.sleep(0)
        entries += [_shown(one) for one in scored[first : first + SLICE]]
    return entries


class CompletionLogprobs:
    """The tokens of one text, in the format of completions, in parts. Each part is serialized at
    once, because a long prompt's log probabilities take megabytes."""

    def __init__(self, offset: int) -> None:
        """`offset`: number of characters before the first token."""
        self._offset = offset
        self._held = b""  # the first bytes of an incomplete UTF-8 character
        self._is_unknown = False
        self._written: list[list[bytes]] = [[] for _ in _COLUMNS]

    async def add_prompt(self, found: Logprobs, text: str) -> None:
        """Add a prompt's tokens to the next part. The first token has no log probability. The
        tokens may begin with a BOS token or a space that `text` does not contain."""
        some: list[ScoredToken] = []
        self._is_unknown = True
        async for scored in scored_tokens(found):
            some.append(scored)
            if len(some) == 2 and not self._written[0]:
                begin = (some[0].token + some[1].token).decode(errors="ignore")
                self._offset -= next(n for n in range(len(begin) + 1) if text.startswith(begin[n:]))
            if len(some) == SLICE:
                self._add(some)
                some = []
        self._add(some)

    async def part(self, scored: Sequence[ScoredToken]) -> Json:
        """The added tokens and these, as one part."""
        for first in range(0, len(scored), SLICE):
            if first:
                await asyncio.sleep(0)
            self._add(scored[first : first + SLICE])
        written, self._written = self._written, [[] for _ in _COLUMNS]
        return {
            name: orjson.Fragment(b"[" + b",".join(pieces) + b"]")
            for name, pieces in zip(_COLUMNS, written, strict=True)
        }

    def _add(self, scored: Sequence[ScoredToken]) -> None:
        rows = [self._row(one) for one in scored]
        for pieces, column in zip(self._written, zip(*rows, strict=True), strict=False):
            pieces.append(orjson.dumps(column)[1:-1])

    def _row(self, one: ScoredToken) -> tuple[Any, ...]:
        offset = max(0, self._offset)
        text, self._held = _whole_characters(self._held + one.token)
        self._offset += len(text)
        if self._is_unknown:
            self._is_unknown = False
            return _name(one.token), None, None, offset
        likely = {_name(token): logprob for token, logprob in chain(one.likely, [one[:2]])}
        return _name(one.token), one.logprob, likely, offset


def _shown(scored: ScoredToken) -> Entry:
    likely = [_entry(token, logprob) for token, logprob in scored.likely]
    shown = _entry(scored.token, scored.logprob) | {"top_logprobs": likely}
    return orjson.Fragment(orjson.dumps(shown))


def _entry(token: bytes, logprob: float) -> Json:
    return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}


def _name(token: bytes) -> str:
    """The token as text. If the token is only a part of a character, its bytes in OpenAI's
    notation."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join([f"\\x{byte:02x}" for byte in token])


def _whole_characters(data: bytes) -> tuple[str, bytes]:
    """The complete characters, and the bytes of an incomplete one at the end."""
    for size in range(min(3, len(data)) + 1):
        try:
            return data[: len(data) - size].decode(), data[len(data) - size :]
        except UnicodeDecodeError:
            continue
    return data.decode(errors="replace"), b""
