"""A chat prompt whose values may become available later.

LangChain formats a prompt to text at once, so it needs the text of every value. `LazyPrompt`
formats the template with a random mark for each value, then splits the text at the marks. The
128-bit marks cannot occur in user text and never leave this module."""

import re
import secrets
from collections.abc import Iterator
from typing import Any, Self

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from langchain_core.prompts import (
    ChatPromptTemplate,
    HumanMessagePromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
    SystemMessagePromptTemplate,
)
from langchain_core.runnables import RunnableConfig, RunnableSerializable
from pydantic import model_validator

from parrot.frontend.pfunc.semantic_variable import SemanticVariable
from parrot.integrations.langchain.messages import FixedMessage, LazyHumanMessage, Part, values_of
from parrot.protocol.errors import InvalidRequest


class LazyPrompt(RunnableSerializable[Any, PromptValue]):
    """Formats `template` with messages and variables as values and waits for none of them. The
    items of a list value are joined with `separator`.

    The template may have system and human texts in f-string format, and `MessagesPlaceholder`,
    whose messages pass through unchanged. Raises `ValueError` for other templates."""

    template: ChatPromptTemplate
    separator: str = "\n\n"

    @model_validator(mode="after")
    def _only_text(self) -> Self:
        for message in self.template.messages:
            if isinstance(message, BaseMessage | MessagesPlaceholder):
                continue
            if (
                not isinstance(message, HumanMessagePromptTemplate | SystemMessagePromptTemplate)
                or not isinstance(message.prompt, PromptTemplate)
                or message.prompt.template_format != "f-string"
            ):
                raise ValueError(f"LazyPrompt takes text in f-string format, not {message!r}")
        return self

    def invoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> PromptValue:
        return self._call_with_config(self._format, input, config, run_type="prompt")

    async def ainvoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> PromptValue:
        return await self._acall_with_config(self._aformat, input, config, run_type="prompt")

    async def _aformat(self, given: Any) -> PromptValue:
        return self._format(given)

    def _format(self, given: Any) -> PromptValue:
        """Raises `KeyError` for a value that is missing."""
        placeholders = {
            message.variable_name
            for message in self.template.messages
            if isinstance(message, MessagesPlaceholder)
        }
        marks = _Marks()
        values = {
            name: value if name in placeholders else marks.mark(value)
            for name, value in self._values(given).items()
        }
        messages = self.template.format_messages(**values)
        return ChatPromptValue(messages=[self._opened(message, marks) for message in messages])

    def _values(self, given: Any) -> dict[str, Any]:
        if isinstance(given, dict):
            return given
        names = self.template.input_variables
        if len(names) != 1:
            raise TypeError(f"the prompt needs a dict with values for {names}")
        return {names[0]: given}

    def _opened(self, message: BaseMessage, marks: "_Marks") -> BaseMessage:
        if not isinstance(message.content, str) or len(parts := list(marks.split(message))) < 2:
            return message
        opened = [part for part in self._parts(parts) if part not in ("", FixedMessage(""))]
        if isinstance(message, HumanMessage):
            return LazyHumanMessage.of(opened)
        if any(isinstance(part, SemanticVariable) for part in opened):
            raise InvalidRequest(
                "a system message cannot contain a variable without a value: put the variable into "
                "a human message, or fetch its value first"
            )
        texts = [part.text if isinstance(part, FixedMessage) else str(part) for part in opened]
        return SystemMessage("".join(texts))

    def _parts(self, parts: "list[str | _Mark]") -> Iterator[Part]:
        for part in parts:
            if isinstance(part, _Mark):
                yield from values_of(part.value, self.separator)
            else:
                yield FixedMessage(part)


class _Marks:
    """The marks of one prompt, which share a random nonce."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(16)
        self._marks: list[_Mark] = []

    def mark(self, value: Any) -> "_Mark":
        self._marks.append(_Mark(value, f"{self._nonce}.{len(self._marks)}."))
        return self._marks[-1]

    def split(self, message: BaseMessage) -> "Iterator[str | _Mark]":
        """The message's text split at its marks: text, mark, text, ..., text."""
        if isinstance(message, LazyHumanMessage):
            return
        pieces = re.split(rf"{self._nonce}\.([0-9]+)\.", str(message.content))
        for i, piece in enumerate(pieces):
            yield self._marks[int(piece)] if i % 2 else piece


class _Mark:
    """Stands for a value while a template is formatted. A plain `{name}` yields the mark. A format
    such as `{price:.2f}` or a conversion such as `{name!r}` applies to the value itself."""

    def __init__(self, value: Any, text: str) -> None:
        self.value = value
        self._text = text

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else self._text

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return repr(self.value)
