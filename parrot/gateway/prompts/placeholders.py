"""Variables in prompts that come whole: `{{name}}` in a message stands for a variable's value.

    message   "Join: {{a}}"              the chat template sees, and so shows
    marked    "Join: <mark of a>"        "<|im_start|>user\\nJoin: <mark of a><|im_end|>..."
    pieces                               "<|im_start|>user\\n" "Join: " variable a "<|im_end|>..."

The values need not be known: they never go through the template. In the prompt they are plain text
between its pieces, so nothing in them is ever read as markup."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parrot.gateway.prompts.transcript import Message
from parrot.protocol.errors import InvalidRequest
from parrot.protocol.template import Text, parse_template, placeholder
from parrot.serve.graph.nodes import Piece, TextPiece, VariablePiece
from parrot.serve.graph.variable import SemanticVariable
from parrot.serve.prompts.chat import sentinel

MAX_PLACES = 256
_MAX_BRACES = 8192  # double ones, which may be places


@dataclass(frozen=True, slots=True)
class MarkedPrompt:
    """`places`: how often each name stands in the prompt. `names`: by mark."""

    prompt: Sequence[Message] | str
    places: Counter[str]
    names: Mapping[str, str]


def mark_places(prompt: Sequence[Message] | str, names: Sequence[str]) -> MarkedPrompt:
    """The prompt with marks that nobody can guess in the places of these names; other text in
    braces stays. Raises `InvalidRequest` for a name without a place, and for too many places."""
    contents = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt]
    if names and sum(c.count("{{") for c in contents if isinstance(c, str)) > _MAX_BRACES:
        raise InvalidRequest(
            f"the prompt has more than {_MAX_BRACES} `{{{{`", param="parrot.inputs"
        )
    # A template that quotes or escapes a message changes the quote, so that it is noticed.
    marks = {name: f'{sentinel()}"m' for name in names}
    places: Counter[str] = Counter()

    def marked(text: str) -> str:
        if not marks:
            return text
        parts = []
        for piece in parse_template(text):
            if isinstance(piece, Text):
                parts.append(piece.text)
            elif piece.name in marks:
                places[piece.name] += 1
                parts.append(marks[piece.name])
            else:
                parts.append(placeholder(piece.name))
        return "".join(parts)

    new_prompt: Sequence[Message] | str
    if isinstance(prompt, str):
        new_prompt = marked(prompt)
    else:
        new_prompt = [
            {**message, "content": marked(content)}
            if isinstance(content := message.get("content"), str)
            else message
            for message in prompt
        ]
    for name in names:
        if name not in places:
            param = f"parrot.inputs.{name}"
            raise InvalidRequest(f"no message has a placeholder `{name}`", param=param)
    if places.total() > MAX_PLACES:
        raise InvalidRequest(f"more than {MAX_PLACES} placeholders", param="parrot.inputs")
    return MarkedPrompt(new_prompt, places, {mark: name for name, mark in marks.items()})


def put_variables(
    pieces: Sequence[TextPiece], marked: MarkedPrompt, variables: Mapping[str, SemanticVariable]
) -> list[Piece]:
    """The pieces of the marked prompt with variables in its places. Raises `InvalidRequest` if the
    chat template changed or dropped one."""
    pattern = re.compile("|".join(map(re.escape, marked.names)) or r"(?!)")
    places: Counter[str] = Counter()
    placed: list[Piece] = []
    for piece in pieces:
        end = 0
        for match in pattern.finditer(piece.text):
            if match.start() > end:
                placed.append(TextPiece(piece.text[end : match.start()], piece.kind))
            name = marked.names[match[0]]
            places[name] += 1
            placed.append(VariablePiece(variables[name]))
            end = match.end()
        if end < len(piece.text):
            placed.append(TextPiece(piece.text[end:], piece.kind) if end else piece)
    for name, count in marked.places.items():
        if places[name] != count:
            raise InvalidRequest(
                f"the model's chat template does not show the message of `{name}` as it is",
                param=f"parrot.inputs.{name}",
            )
    return placed
