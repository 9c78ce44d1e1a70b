"""Check that each request of a trace got the answer that it gets alone in a fresh engine."""

import json
import re
from base64 import b64decode
from typing import Any

import numpy as np

from parrot.protocol.engine_api import (
    EmbedResponse,
    FillResponse,
    FinishReason,
    GenerateResponse,
    ScoreResponse,
)
from parrot.protocol.errors import (
    Cancelled,
    EngineFailed,
    InvalidRequest,
    NotFound,
    OutOfMemory,
    ParrotError,
    PromptTooLong,
)
from parrot.protocol.sampling import CONSTRAINTS, Logprobs
from tests.fuzz.alone import alone
from tests.fuzz.drawing import BACKGROUND
from tests.fuzz.expectations import Expectations, ExpectedContext, SentRequest, Text
from tests.fuzz.play import Following
from tests.fuzz.traces import Setup
from tests.support.tiny_model import EOS_ID

_TOLERANCE = 2e-3


class Checker:
    """Checks the answers of a trace.

    `slowness` is the number of steps of a request over the number that it takes alone. It contains
    requests without an excuse only. `num_rounded` counts outputs that differ by rounding: the same
    request alone has this output with another chunk size."""

    def __init__(self, setup: Setup, expected: Expectations) -> None:
        self._setup = setup
        self._expected = expected
        self.slowness: dict[int, float] = {}
        self.num_compared = 0
        self.num_rounded = 0

    def check(self) -> None:
        for asked in self._expected.asked.values():
            if asked.error is not None:
                self._check_error(asked, asked.error)
            else:
                self._check_response(asked)

    def check_following(self, following: Following) -> None:
        asked = following.asked
        generating = [a for a, _ in asked.lines[-1].pieces if a.ask.sampling]
        is_whole = following.is_early and not following.has_left and generating == [asked]
        if not is_whole or not isinstance(asked.response, GenerateResponse):
            return
        chunks = [chunk for chunk in following.chunks if chunk is not None]
        assert "".join(c.text for c in chunks) == asked.response.generated_text, "followed text"
        assert [i for c in chunks for i in c.ids] == asked.response.generated_ids, "followed ids"

    # -- errors ------------------------------------------------------------------------------

    def _check_error(self, asked: SentRequest, error: ParrotError) -> None:
        assert self._may_fail(asked, error), f"request {asked.ask.number} must not fail: {error!r}"

    def _may_fail(self, asked: SentRequest, error: ParrotError) -> bool:
        prompts = self._prompts(asked)
        known = [text for text in prompts if text is not None]
        if len(known) < len(prompts):
            return isinstance(error, ParrotError)
        generates = asked.ask.sampling is not None
        match error:
            case Cancelled() | NotFound():
                return bool(asked.excuse) or any(map(_was_short, asked.lines))
            case OutOfMemory():
                return asked.ask.priority >= BACKGROUND
            case PromptTooLong():
                limit = min(
                    self._setup.max_seq_len, self._setup.num_blocks * self._setup.block_size
                )
                return max(len(t) for t in known) + generates > limit
            case EngineFailed():
                said = self._said(asked, known[-1]) if generates else ()
                poison = self._setup.poison
                return poison is not None and any(poison in t for t in (*known, said))
            case InvalidRequest():
                if not all(known):
                    return True
                return isinstance(alone(self._setup, asked.ask, known[-1]).outcome, InvalidRequest)
        return False

    def _prompts(self, asked: SentRequest) -> list[Text | None]:
        """Return the tokens of each context of the request, including its pieces."""
        found: list[Text | None] = []
        for line, piece in zip(asked.lines, asked.ask.pieces, strict=True):
            at = next(i for i, (_, other) in enumerate(line.pieces) if other is piece)
            text, is_whole = line.text(at, as_if=asked)
            found.append((*text, *piece.tokens) if is_whole else None)
        return found

    def _said(self, asked: SentRequest, prompt: Text) -> Text:
        outcome = alone(self._setup, asked.ask, prompt).outcome
        return tuple(outcome.generated_ids) if isinstance(outcome, GenerateResponse) else ()

    # -- answers -----------------------------------------------------------------------------

    def _check_response(self, asked: SentRequest) -> None:
        response, number = asked.response, asked.ask.number
        if isinstance(response, GenerateResponse):
            _check_output(asked.ask.sampling or {}, response)
        if isinstance(response, GenerateResponse) and asked.chunks:
            assert "".join(c.text for c in asked.chunks) == response.generated_text, number
            assert [i for c in asked.chunks for i in c.ids] == response.generated_ids, number
        if isinstance(response, FillResponse):
            num_filled = sum(len(piece.tokens) for piece in asked.ask.pieces)
            assert response.filled_len == num_filled, (number, response)
            return
        prompt = asked.prompt()
        if prompt is None:
            return
        expected = alone(self._setup, asked.ask, prompt)
        self.num_compared += 1
        if not _are_equal(response, expected.outcome):
            for chunk in (1, 3, 7):
                if _are_equal(response, alone(self._setup, asked.ask, prompt, chunk).outcome):
                    self.num_rounded += 1
                    return
            raise AssertionError(
                f"request {number} of {len(prompt)} tokens got {response!r}, and alone "
                f"{expected.outcome!r}"
            )
        if not asked.excuse:
            self.slowness[number] = (asked.ended - asked.began) / max(1, expected.num_steps)


def _was_short(line: ExpectedContext) -> bool:
    """Whether its parent had too few tokens at the fork. Other requests may have added more."""
    if line.parent is None or line.length is None:
        return False
    return len(line.parent.text(line.mark)[0]) < line.length


def _check_output(sampling: dict[str, Any], response: GenerateResponse) -> None:
    """Check invariants of an output that do not depend on the engine's answer to a lone request."""
    text, count = response.generated_text, len(response.generated_ids)
    assert 0 < count <= sampling["max_gen_length"], response
    stops = sampling.get("stop_str") or ()
    assert not any(stop in text for stop in ([stops] if isinstance(stops, str) else stops)), text
    last = response.generated_ids[-1]
    is_cut = response.stop_string is not None or last in sampling.get("stop_token_ids", ())
    if response.finish_reason is FinishReason.LENGTH or is_cut:
        return
    assert last == EOS_ID or any(field in sampling for field in CONSTRAINTS), response
    if (pattern := sampling.get("regex")) is not None:
        assert re.fullmatch(pattern, text), text
    if (choices := sampling.get("choices")) is not None:
        assert text in choices, text
    if sampling.get("json_schema") is not None:
        assert json.loads(text).keys() == {"a", "b"}, text


def _are_equal(one: object, other: object) -> bool:
    if isinstance(one, GenerateResponse) and isinstance(other, GenerateResponse):
        return (
            one.generated_ids == other.generated_ids
            and one.generated_text == other.generated_text
            and one.finish_reason == other.finish_reason
            and one.stop_string == other.stop_string
            and _are_near(one.logprobs, other.logprobs)
        )
    if isinstance(one, EmbedResponse) and isinstance(other, EmbedResponse):
        vectors = [np.frombuffer(b64decode(r.embeddings[0]), "<f4") for r in (one, other)]
        return bool(np.allclose(*vectors, atol=_TOLERANCE))
    if isinstance(one, ScoreResponse) and isinstance(other, ScoreResponse):
        return _are_near(one.logprobs[0], other.logprobs[0])
    return False


def _are_near(one: Logprobs | None, other: Logprobs | None) -> bool:
    """Compare log probabilities. Tokens of equal probability may be in any order."""
    if one is None or other is None:
        return one is other
    if one.width != other.width or len(one) != len(other):
        return False
    if list(one.ids)[:: one.width] != list(other.ids)[:: other.width]:
        return False
    return bool(np.allclose(np.array(one.values), np.array(other.values), atol=_TOLERANCE))
