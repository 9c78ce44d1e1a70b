"""Conversation templates turn a function into a chat. The text before an output is the user's turn,
and the output is the assistant's turn."""

from collections.abc import Iterator, Sequence
from enum import IntEnum, auto

from parrot.frontend.pfunc.function import SemanticFunction
from parrot.frontend.pfunc.function_body import FuncBodyPiece, ParameterLoc
from parrot.frontend.pfunc.transforms import FuncMutator


class SeparatorStyle(IntEnum):
    """The end of an assistant's turn: `sep`, or `sep2`."""

    ADD_COLON_SINGLE = auto()
    ADD_COLON_TWO = auto()


class ConversationTemplate(FuncMutator):
    """A fixed chat format that becomes part of the prompt. Use it for models with this format.

    With roles ["USER", "ASSISTANT"], sep " " and sep2 "</s>", "Say {{a}} Now {{b}}" becomes
    "SYSTEM USER: Say ASSISTANT: {{a}}</s>USER: Now ASSISTANT: {{b}}</s>"."""

    def __init__(
        self,
        system_message: str,
        roles: Sequence[str],
        system_template: str = "{system_message}",
        seperator_style: SeparatorStyle = SeparatorStyle.ADD_COLON_SINGLE,
        sep: str = "\n",
        sep2: str = "\n",
    ) -> None:
        """`seperator_style` is spelled as the programs of earlier versions spell it."""
        self.system_message = system_message
        self.roles = tuple(roles)
        self.system_template = system_template
        self.seperator_style = SeparatorStyle(seperator_style)
        self.sep = sep
        self.sep2 = sep2

    def transform(self, func: SemanticFunction) -> SemanticFunction:
        user, assistant = self.roles[:2]
        is_single = self.seperator_style is SeparatorStyle.ADD_COLON_SINGLE
        end = self.sep if is_single else self.sep2
        text = self.system_template.format(system_message=self.system_message) + self.sep
        for turn, output in _rounds(func.body):
            text += f"{user}: {turn}"
            if output is not None:
                text += f"{self.sep}{assistant}: {output}{end}"
        return func.with_template(text)


class ChatTemplate(FuncMutator):
    """Lets ServeCore apply the chat template of the serving model; the text does not change.
    `with_system("...")` adds a system message. Without it, the template may add a message of its
    own."""

    def __init__(self, system_message: str | None = None) -> None:
        self.system_message = system_message

    def with_system(self, system_message: str) -> "ChatTemplate":
        """A copy of the template with a system message."""
        return ChatTemplate(system_message)

    def transform(self, func: SemanticFunction) -> SemanticFunction:
        return func.with_metadata(chat=True, system=self.system_message)


def _rounds(body: Sequence[FuncBodyPiece]) -> Iterator[tuple[str, str | None]]:
    """Yield (the user's turn, the output that answers it). The output is None for text after the
    last output. Turns are stripped of white space, as chat formats require."""
    turn = ""
    for piece in body:
        if isinstance(piece, ParameterLoc) and piece.param.is_output:
            yield turn.strip(), piece.text
            turn = ""
        else:
            turn += piece.text
    if rest := turn.strip():
        yield rest, None


# Copied from FastChat's conversation.py, "vicuna_v1.1".
vicuna_template = ConversationTemplate(
    system_message="A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    roles=("USER", "ASSISTANT"),
    seperator_style=SeparatorStyle.ADD_COLON_TWO,
    sep=" ",
    sep2="</s>",
)

chat_template = ChatTemplate()
