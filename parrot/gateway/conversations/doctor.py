"""The prefix doctor: where a program's prompt left the one before it, and the likely reason.

A prompt shares the KV of an earlier one up to the first character that differs, and no further. A
program that resends its history with a new date in its system prompt shares nothing."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from parrot.gateway.prompts.transcript import Message
from parrot.serve.config import PrefixRepair
from parrot.utils.heaps import LruDict

Reason = Literal[
    "tools_reordered",
    "tools_changed",
    "date",
    "nonce",
    "system_changed",
    "history_changed",
    "template",
]
_MAX_TEXT = 2**26  # characters of prompts that are kept
_MAX_ANSWERS = 65_536
_MAX_QUOTED = 8  # answers of a prompt that are looked up, the last ones
_MIN_ANSWER = 16  # characters
_EXCERPT = 24  # characters on either side
_CHUNK = 65_536
_DATE = re.compile(
    r"\d{4}-\d\d-\d\d|\d{1,2}:\d\d|\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]* \d"
    r"|\d (?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)|\b(?:mon|tues|wednes|thurs|fri|satur"
    r"|sun)day",
    re.IGNORECASE,
)
_NONCE = re.compile(r"(?=[^\d]*\d)[\w-]{6,}")
# A line that Claude Code puts before its system prompt, with a new value in each request.
_VOLATILE = re.compile(r"^x-anthropic-billing-header:.*(?:\n|$)", re.MULTILINE)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Prompt:
    """A prompt as its program sent it, and as the model was shown it."""

    messages: Sequence[Message]
    options: Mapping[str, Any]
    text: str


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """`at`: the characters that two prompts of a program have in common. `message`: index of the
    first message that differs; None if none does. `before` and `after` are what stands around the
    place in the earlier prompt and in the later one."""

    reason: Reason
    at: int
    message: int | None
    before: str
    after: str

    @property
    def summary(self) -> str:
        """One line for a header, without the prompts' texts."""
        message = "" if self.message is None else f"; message={self.message}"
        return f"broken; reason={self.reason}{message}; at={self.at}"

    def __str__(self) -> str:
        """One line for people."""
        where = "" if self.message is None else f" in message {self.message}"
        change = f"{self.before!r} became {self.after!r}"
        return f"{self.reason}{where}, after {self.at} characters: {change}"


class PrefixDoctor:
    """Keeps the last prompt of each program, the least recently used ones up to a bound, and knows
    programs by what was answered to them."""

    def __init__(self, repair: PrefixRepair, on_break: Callable[[Reason], None]) -> None:
        self._repair = repair
        self._on_break = on_break
        self._prompts: LruDict[int, Prompt] = LruDict(_MAX_TEXT, weigh=lambda p: len(p.text))
        self._answers: LruDict[bytes, int] = LruDict(_MAX_ANSWERS)

    def repaired(self, prompt: Sequence[Message] | str) -> Sequence[Message] | str:
        """The prompt as it is to be shown to the model."""
        if self._repair == "on" and not isinstance(prompt, str):
            return repaired(prompt)
        return prompt

    def program_of(self, tenant: str, prompt: Prompt) -> int | None:
        """The session in which one of the last answers that the prompt quotes was given."""
        answers = [m for m in prompt.messages if m.get("role") == "assistant"]
        keys = [_answer_key(tenant, answer) for answer in answers[: -_MAX_QUOTED - 1 : -1]]
        return next((found for key in keys if (found := self._answers.get(key)) is not None), None)

    def examine(self, session_id: int, prompt: Prompt, *, is_continued: bool) -> PrefixBreak | None:
        """Where the prompt left the last one of its session, if it continues none of its turns."""
        if self._repair == "off":
            return None
        earlier = self._prompts.get(session_id)
        self._prompts.put(session_id, prompt)
        if earlier is None or is_continued:
            return None
        found = diagnose(earlier, prompt)
        self._on_break(found.reason)
        return found

    def remember_answer(self, tenant: str, session_id: int, answer: Message) -> None:
        """Short answers are not remembered: many programs get the same."""
        if answer.get("tool_calls") or len(answer["content"]) >= _MIN_ANSWER:
            self._answers.put(_answer_key(tenant, answer), session_id)

    def forget(self, session_id: int) -> None:
        """The session has ended."""
        self._prompts.pop(session_id)


def diagnose(earlier: Prompt, later: Prompt) -> PrefixBreak:
    """Why `later` does not begin with all of `earlier`."""
    at = _common_length(earlier.text, later.text)
    message = _first_difference(earlier.messages, later.messages)
    before, after = _around(earlier.text, at), _around(later.text, at)
    return PrefixBreak(_reason(earlier, later, message, before, after), at, message, before, after)


def repaired(messages: Sequence[Message]) -> list[Message]:
    """The messages without what is known to differ with every request and to mean nothing to the
    model: the system prompt's lines that begin with `x-anthropic-billing-header:`."""
    return [
        {**message, "content": _VOLATILE.sub("", message["content"])}
        if message["role"] == "system" and _VOLATILE.search(message["content"])
        else message
        for message in messages
    ]


def _answer_key(tenant: str, answer: Message) -> bytes:
    text = orjson.dumps([tenant, answer], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(text).digest()


def _reason(earlier: Prompt, later: Prompt, message: int | None, before: str, after: str) -> Reason:
    tools, tools_now = earlier.options.get("tools", ()), later.options.get("tools", ())
    if tools != tools_now:
        is_same = sorted(map(repr, tools)) == sorted(map(repr, tools_now))
        return "tools_reordered" if is_same else "tools_changed"
    if message is not None and earlier.messages[message].get("role") != "system":
        return "history_changed"
    if _DATE.search(before) and _DATE.search(after):
        return "date"
    if message is None:
        return "template"
    if _NONCE.search(before) and _NONCE.search(after):
        return "nonce"
    return "system_changed"


def _first_difference(earlier: Sequence[Message], later: Sequence[Message]) -> int | None:
    for i, message in enumerate(earlier):
        if i >= len(later) or later[i] != message:
            return i
    return None


def _common_length(one: str, other: str) -> int:
    limit, at = min(len(one), len(other)), 0
    while at < limit and one[at : at + _CHUNK] == other[at : at + _CHUNK]:
        at += _CHUNK
    end = min(limit, at + _CHUNK)
    return next((i for i in range(at, end) if one[i] != other[i]), limit)


def _around(text: str, at: int) -> str:
    return text[max(0, at - _EXCERPT) : at + _EXCERPT]
