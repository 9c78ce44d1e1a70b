"""Conversation templates make a chat of a function: what leads to an output is the user's turn, the
output is the assistant's."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import IntEnum, auto

from parrot.frontend.pfunc.function import SemanticFunction
from parrot.frontend.pfunc.function_body import (
    Constant,
    FuncBodyPiece,
    Parameter,
    ParameterLoc,
)
from parrot.frontend.pfunc.transforms.func_mutator import FuncMutator

Piece = str | Parameter


class SeparatorStyle(IntEnum):
    """The end of an assistant's turn: `sep`, or `sep2`."""

    ADD_COLON_SINGLE = auto()
    ADD_COLON_TWO = auto()


class ConversationTemplate(FuncMutator):
    """A chat format that is written into the template, for models known to use it.

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
        pieces = list(self._conversation(func.body))
        return func.with_body(
            [
                Constant(idx, piece) if isinstance(piece, str) else ParameterLoc(idx, piece)
                for idx, piece in enumerate(pieces)
            ]
        )

    def _conversation(self, body: Sequence[FuncBodyPiece]) -> Iterator[Piece]:
        is_single = self.seperator_style is SeparatorStyle.ADD_COLON_SINGLE
        yield self.system_template.format(system_message=self.system_message) + self.sep
        for turn, output in _rounds(body):
            yield f"{self.roles[0]}: "
            yield from turn
            if output is not None:
                yield f"{self.sep}{self.roles[1]}: "
                yield output
                yield self.sep if is_single else self.sep2


class ChatTemplate(FuncMutator):
    """Leaves the text alone and asks ServeCore to apply the chat template of the serving model.
    `system_message`: None leaves it to the model's template, which may have one of its own."""

    def __init__(self, system_message: str | None = None) -> None:
        self.system_message = system_message

    def with_system(self, system_message: str) -> "ChatTemplate":
        """The same template for chats that begin with this message of the role `system`."""
        return ChatTemplate(system_message)

    def transform(self, func: SemanticFunction) -> SemanticFunction:
        return func.with_metadata(replace(func.metadata, chat=True, system=self.system_message))


def _rounds(body: Sequence[FuncBodyPiece]) -> Iterator[tuple[list[Piece], Parameter | None]]:
    """(the user's turn, the output that answers it); None after the last output. A turn has no
    white space at its edges, as the chat formats have none there."""
    turn: list[Piece] = []
    for piece in body:
        if isinstance(piece, Constant):
            turn.append(piece.text)
        elif isinstance(piece, ParameterLoc) and piece.param.is_output:
            yield _stripped(turn), piece.param
            turn = []
        elif isinstance(piece, ParameterLoc):
            turn.append(piece.param)
    if rest := _stripped(turn):
        yield rest, None


def _stripped(turn: list[Piece]) -> list[Piece]:
    if turn and isinstance(first := turn[0], str):
        turn = [first.lstrip(), *turn[1:]]
    if turn and isinstance(last := turn[-1], str):
        turn = [*turn[:-1], last.rstrip()]
    return [piece for piece in turn if piece != ""]


# Source of the text: FastChat's conversation.py, "vicuna_v1.1".
vicuna_template = ConversationTemplate(
    system_message="A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    roles=("USER", "ASSISTANT"),
    seperator_style=SeparatorStyle.ADD_COLON_TWO,
    sep=" ",
    sep2="</s>",
)

chat_template = ChatTemplate()
