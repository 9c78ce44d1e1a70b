"""Reasoning: what models write before their answers, between `<think>` and `</think>`.

    "<think>\\nThe sky is up.\\n</think>\\n\\nLook up."
              ReasoningDelta           TextDelta

The chat template tells whether a model does so; it may begin the reasoning itself, as the end of
the prompt, or say there that there is none."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from parrot.gateway.prompts.answers import AnswerParser, Event, ReasoningDelta

_BEGIN, _END = "<think>", "</think>"
_EFFORTS_OF_NONE = ("none", "disabled")


class ReasoningParser:
    """Tells reasoning from what follows it, which is for another parser. Newlines around the tags
    are markup. An answer that does not begin with the tag has no reasoning, unless it begins
    inside; what is not closed is reasoning."""

    def __init__(self, answer: AnswerParser, *, begins_inside: bool = False) -> None:
        self._answer = answer
        self._begins_inside = begins_inside
        self._held = ""
        self._read: Callable[[], Iterator[Event]] = self._at_begin

    def feed(self, text: str) -> Iterator[Event]:
        self._held += text
        yield from self._read()

    def finish(self) -> Iterator[Event]:
        held, self._held = self._held, ""
        if self._read == self._inside:
            yield from self._reasoned(held.rstrip("\n"))
        elif self._read == self._at_begin and self._begins_inside:
            yield from self._reasoned(held.strip("\n"))
        elif held:
            yield from self._answer.feed(held)
        yield from self._answer.finish()

    def _at_begin(self) -> Iterator[Event]:
        begun = self._held.lstrip()
        if len(begun) < len(_BEGIN) and _BEGIN.startswith(begun):
            return
        if begun.startswith(_BEGIN):
            self._held = begun.removeprefix(_BEGIN)
        elif not self._begins_inside:
            self._read = self._text
            yield from self._text()
            return
        self._read = self._opened
        yield from self._opened()

    def _opened(self) -> Iterator[Event]:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._read = self._inside
            yield from self._inside()

    def _inside(self) -> Iterator[Event]:
        inner, found, behind = self._held.partition(_END)
        if found:
            self._held, self._read = behind, self._behind
            yield from self._reasoned(inner.rstrip("\n"))
            yield from self._behind()
            return
        sizes = range(min(len(inner), len(_END) - 1), 0, -1)
        size = next((size for size in sizes if inner.endswith(_END[:size])), 0)
        shown = inner[: len(inner) - size].rstrip("\n")
        self._held = inner[len(shown) :]
        yield from self._reasoned(shown)

    def _behind(self) -> Iterator[Event]:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._read = self._text
            yield from self._text()

    def _text(self) -> Iterator[Event]:
        text, self._held = self._held, ""
        yield from self._answer.feed(text)

    def _reasoned(self, text: str) -> Iterator[Event]:
        if text:
            yield ReasoningDelta(text)


def with_reasoning(
    make_parser: Callable[[], AnswerParser], template: str, prompt: str
) -> Callable[[], AnswerParser]:
    """For answers to a prompt that the template has rendered."""
    end = prompt.rstrip()
    if _END not in template or end.endswith(_END):
        return make_parser
    begins_inside = end.endswith(_BEGIN)
    return lambda: ReasoningParser(make_parser(), begins_inside=begins_inside)


def reasoning_options(effort: str | None) -> Mapping[str, Any]:
    """The options, for an effort that is wanted, of templates that can switch reasoning on and
    off."""
    if effort is None:
        return {}
    thinks = effort not in _EFFORTS_OF_NONE
    return {"enable_thinking": thinks, "thinking": thinks}
