"""LangChain messages whose text is fetched on first access.

    LazyHumanMessage  FixedMessage("Combine: ")  variable  FixedMessage(" and ")  "a text"
    LazyAIMessage     variable

Before that access a message is a list of parts. A prompt that contains the message refers to its
variables and does not wait for their values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.runnables import Runnable, RunnableLambda
from pydantic import PrivateAttr

from parrot.frontend.pfunc.many import agather, gather
from parrot.frontend.pfunc.semantic_variable import SemanticVariable
from parrot.protocol.errors import InvalidRequest
from parrot.protocol.public import TokenUsage


@dataclass(frozen=True, slots=True)
class FixedMessage:
    """Constant text from a prompt template. Many prompts share it as a prefix."""

    text: str


Part = FixedMessage | str | SemanticVariable


@dataclass(frozen=True, slots=True)
class Parts:
    """The content of a message. Copies of the message share it. A pickled message loses it."""

    of: tuple[Part, ...]

    @property
    def variables(self) -> list[SemanticVariable]:
        return list(dict.fromkeys(part for part in self.of if isinstance(part, SemanticVariable)))

    @property
    def text(self) -> str:
        """The text of the message. All variables must be ready."""
        return "".join(map(_text, self.of))

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return (type(None), ())


class LazyMessage(BaseMessage):
    """A message that fetches its values when a field of `fetched_fields` is read, or when it is
    compared, copied, dumped or printed. If the call failed, each of these raises the call's error.
    A message that is created with `content` has nothing to fetch."""

    fetched_fields: ClassVar[frozenset[str]] = frozenset({"content"})

    _parts: Parts | None = PrivateAttr(None)
    _is_fetched: bool = PrivateAttr(True)

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Self:
        message = cls.model_validate({"content": ""})
        message._parts = Parts(tuple(parts))
        message._is_fetched = False
        return message

    @property
    def parts(self) -> Parts | None:
        """The parts of the message. None if the message was created from plain text."""
        return self._parts

    async def aget(self) -> Self:
        """Wait for the message's values and return the message. In async code, reading a field
        without this call blocks the event loop."""
        if not self._is_fetched and self._parts is not None:
            await agather(self._parts.variables)
            self._fetch()
        return self

    def _fetch(self) -> None:
        parts = self._parts
        if self._is_fetched or parts is None:
            return
        gather(parts.variables)
        fields = object.__getattribute__(self, "__dict__")
        fields |= self._fields(parts)
        self._is_fetched = True

    def _fields(self, parts: Parts) -> dict[str, Any]:
        """The values of the fetched fields. All variables must be ready."""
        return {"content": parts.text}

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__" or name in type(self).fetched_fields:
            private = object.__getattribute__(self, "__pydantic_private__")
            if private is not None and not private.get("_is_fetched", True):
                object.__getattribute__(self, "_fetch")()
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Setting other fields, such as `name` or `id`, does not fetch the text."""
        cls = type(self)
        if name in cls.model_fields and name not in cls.fetched_fields:
            object.__getattribute__(self, "__dict__")[name] = value
            self.__pydantic_fields_set__.add(name)
        else:
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        """Show the parts without fetching: a debugger or a log line must not block."""
        if self._is_fetched:
            return super().__repr__()
        assert self._parts is not None
        return f"{type(self).__name__}{self._parts.of!r}"

    @classmethod
    def lc_id(cls) -> list[str]:
        """LangChain's id of the base class: a dumped message loads as a plain LangChain message."""
        return [*cls.get_lc_namespace(), cls.__name__.removeprefix("Lazy")]


class LazyHumanMessage(LazyMessage, HumanMessage):
    type: Literal["human"] = "human"


class LazyAIMessage(LazyMessage, AIMessage):
    """The output of a call."""

    fetched_fields = frozenset({"content", "response_metadata", "usage_metadata"})

    type: Literal["ai"] = "ai"

    @property
    def variable(self) -> SemanticVariable | None:
        """The output as a semantic variable, to pass to semantic functions and other calls."""
        return None if self._parts is None else self._parts.variables[0]

    def _fields(self, parts: Parts) -> dict[str, Any]:
        return answer_fields(parts.variables[0])


def answer_fields(variable: SemanticVariable) -> dict[str, Any]:
    """The fields of an AI message with the value of a ready variable."""
    return {
        "content": variable.content,
        "response_metadata": {"finish_reason": variable.finish_reason},
        "usage_metadata": None if variable.usage is None else _usage(variable.usage),
    }


def _usage(usage: TokenUsage) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        total_tokens=usage.prompt_tokens + usage.output_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )


def parts_of(message: BaseMessage) -> tuple[Part, ...]:
    """The parts of any message. Raises `InvalidRequest` for content other than text."""
    if isinstance(message, LazyMessage) and message.parts is not None:
        return message.parts.of
    blocks = [message.content] if isinstance(message.content, str) else message.content
    if all(isinstance(block, str) or block.get("type") == "text" for block in blocks):
        return (str(message.text),)
    raise InvalidRequest("only text can be part of a message", param="messages")


def values_of(value: Any, separator: str) -> Iterator[Part]:
    """The parts of a prompt's value: a message, a variable, a list of these, or any other object,
    which is formatted as text. Fetches nothing."""
    if isinstance(value, SemanticVariable):
        yield value
    elif isinstance(value, BaseMessage):
        for part in parts_of(value):
            yield part.text if isinstance(part, FixedMessage) else part
    elif isinstance(value, list | tuple) and any(
        isinstance(item, SemanticVariable | BaseMessage) for item in value
    ):
        for i, item in enumerate(value):
            if i:
                yield separator
            yield from values_of(item, separator)
    else:
        yield format(value, "")


def _text(part: Part) -> str:
    if isinstance(part, SemanticVariable):
        assert part.content is not None, part
        return part.content
    return part.text if isinstance(part, FixedMessage) else part


def _fetched(given: Any) -> Any:
    gather(_open_variables(given))
    return _plain(given)


async def _afetched(given: Any) -> Any:
    await agather(_open_variables(given))
    return _plain(given)


def _open_variables(given: Any) -> list[SemanticVariable]:
    """The variables of a message, or of all messages of a list."""
    items = given if isinstance(given, list) else [given]
    parts = [item.parts for item in items if isinstance(item, LazyMessage)]
    return [variable for part in parts if part is not None for variable in part.variables]


def _plain(given: Any) -> Any:
    if isinstance(given, list):
        return list(map(_plain, given))
    if isinstance(given, LazyAIMessage):
        return AIMessage(**given.model_dump())
    if isinstance(given, LazyHumanMessage):
        return HumanMessage(**given.model_dump())
    return given


fetch: Runnable[Any, Any] = RunnableLambda(_fetched, _afetched, name="fetch")
"""A runnable that waits for a message or a list of messages and returns plain LangChain messages.
In async code it does not block the event loop. Other values pass through unchanged."""
