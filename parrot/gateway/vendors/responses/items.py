"""The items of responses (messages, calls, their results), and the messages that chat templates
are shown for them."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    model_validator,
)

from parrot.gateway.vendors.openai_common import (
    MAX_PARTS,
    Content,
    Ignored,
    Json,
    arguments_of,
    text_of,
)
from parrot.protocol.fields import (
    Bounded,
    ForeignId,
    JsonObject,
    Label,
    Text,
    Wire,
    check_sizes,
)
from parrot.protocol.fields import Item as ListItem

MAX_ITEMS = 4096


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict) and None in value.values():
        return {name: field for name, field in value.items() if field is not None}
    return value


class Dumped(Wire):
    """An item that clients may send as they got it, with nulls for fields that are not there."""

    _without_nulls = model_validator(mode="before")(_drop_nulls)


class Item(ListItem):
    id_prefix: ClassVar[str]

    id: ForeignId | None = None
    status: Ignored = None

    @property
    def written(self) -> str:
        """All texts that it keeps."""
        return self.model_dump_json()

    def listed(self) -> Json:
        """The item as clients read it."""
        return {"status": "completed"} | self.model_dump(exclude_none=True)


class MessageItem(Item):
    id_prefix = "msg"

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Ignored = None

    @property
    def written(self) -> str:
        if isinstance(self.content, str) and self.status is None and self.phase is None:
            return self.content
        return super().written

    def listed(self) -> Json:
        fields = super().listed()
        if isinstance(self.content, str):
            if self.role == "assistant":
                part: Json = {"type": "output_text", "text": self.content, "annotations": []}
            else:
                part = {"type": "input_text", "text": self.content}
            fields["content"] = [part]
        return fields


class CallItem(Item):
    id_prefix = "fc"

    type: Literal["function_call"]
    call_id: ForeignId
    name: Label
    namespace: ForeignId | None = None
    arguments: Text = "{}"
    caller: Ignored = None
    parsed_arguments: Ignored = Field(None, exclude=True)  # what the client made of them


class CallOutputItem(Item):
    id_prefix = "fco"

    type: Literal["function_call_output"]
    call_id: ForeignId
    output: Content
    name: Ignored = None
    caller: Ignored = None


class ItemReference(Wire):
    """Stands for an item of a response that is kept."""

    type: Literal["item_reference"] | None = None
    id: ForeignId


class ReasoningText(Bounded):
    text: Text = ""


class ReasoningItem(Item):
    """Reasoning before an answer, which the chat template shows again or leaves out. What another
    service has encrypted or summed up is left out."""

    model_config = ConfigDict(extra="ignore")
    id_prefix = "rs"

    type: Literal["reasoning"]
    summary: Ignored = Field([])
    content: list[ReasoningText] = Field([], fail_fast=True, max_length=MAX_PARTS)

    @property
    def reasoning(self) -> str:
        return "".join([part.text for part in self.content])


class OtherItem(Bounded):
    """An item of a tool that is not here."""

    type: str = Field(max_length=64)


_KINDS = ("message", "function_call", "function_call_output", "item_reference", "reasoning")


def _kind(value: Any) -> str:
    if not isinstance(value, dict):
        return "message"  # validation says what is wrong with it
    kind = value.get("type")
    if kind is None:
        return "message" if "role" in value else "item_reference"
    return kind if kind in _KINDS else "other"


_AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind),
]


def _as_items(value: Any) -> Any:
    """A text is a message of the user. Clients may send items as they got them, with nulls."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        return value  # validation says what is wrong with it
    return [_drop_nulls(item) for item in check_sizes(value)]


Items = Annotated[
    list[_AnyItem],
    Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS),
    BeforeValidator(
        _as_items,
        json_schema_input_type=Text | Annotated[list[JsonObject], Field(max_length=MAX_ITEMS)],
    ),
]
_JOINED = {"tool_calls", "reasoning_content"}  # a message with these takes an answer's text
_OUTPUT = TypeAdapter(list[_AnyItem])


def output_items(output: Sequence[Json]) -> list[Item]:
    """The items that a response has made."""
    return [item for item in _OUTPUT.validate_python(output) if isinstance(item, Item)]


def template_messages(items: Iterable[Item]) -> list[Json]:
    """The messages as chat templates take them. Reasoning, what an answer says and the calls that
    it makes are items of their own, but one message."""
    messages: list[Json] = []
    for item in items:
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        # The usual type first: models are slow to tell that something is of another.
        if isinstance(item, MessageItem):
            text = text_of(item.content)
            if item.role == "assistant" and last is not None and last.keys() & _JOINED:
                last["content"] += text
            else:
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": text})
        elif isinstance(item, CallItem):
            if last is None:
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            last.setdefault("tool_calls", []).append(_call(item))
        elif isinstance(item, CallOutputItem):
            content = text_of(item.output)
            messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
        elif isinstance(item, ReasoningItem) and (reasoning := item.reasoning):
            fields = {"role": "assistant", "content": "", "reasoning_content": reasoning}
            messages.append(fields)
    return messages


def _call(item: CallItem) -> Json:
    function = {"name": item.name, "arguments": arguments_of(item.arguments, item.name, "input")}
    return {"id": item.call_id, "type": "function", "function": function}
