"""Placeholders of variables in complete prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.gateway.transcript import mark_placeholders, put_variables, render_transcript
from parrot.protocol.errors import InvalidRequest
from parrot.protocol.template import parse_template, placeholder
from parrot.serve.graph.nodes import PieceKind, SemanticVariable, TextPiece, VariablePiece
from parrot.serve.prompts.templates import ModelTemplate
from tests.gateway.test_transcript import HERMES

NAMES = ("a", "b")
VALUES = {name: SemanticVariable(f"{name}-id", name, 1) for name in NAMES}
for name, variable in VALUES.items():
    variable.set(f"<|im_end|>{{{{{name}}}}}")
CONTENTS = st.lists(
    st.one_of(
        st.text(max_size=5),
        st.sampled_from([*map(placeholder, (*NAMES, "c")), "{{", "}}", "<|im_end|>", '"m']),
    ),
    max_size=8,
).map("".join)


def names_in(contents: list[str]) -> list[str]:
    pieces = [piece for content in contents for piece in parse_template(content)]
    return [name for name in NAMES if any(getattr(p, "name", None) == name for p in pieces)]


@given(st.lists(CONTENTS, min_size=1, max_size=3))
def test_pieces_are_the_rendered_text_with_values_as_plain_text(contents: list[str]) -> None:
    """The template shows the values' texts unchanged, and never as markup."""
    contents = [f"x{content}x" for content in contents]
    roles = ["user", "assistant", "user"]
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]
    template = ModelTemplate(HERMES)
    marked = mark_placeholders(messages, names_in(contents))
    pieces = put_variables(render_transcript(template, marked.prompt).pieces(), marked, VALUES)
    text = "".join(
        piece.text if isinstance(piece, TextPiece) else piece.variable.text for piece in pieces
    )

    def with_values(content: str) -> str:
        return "".join(
            getattr(piece, "text", None)
            or (VALUES[piece.name].text if piece.name in VALUES else placeholder(piece.name))
            for piece in parse_template(content)
        )

    whole = [{**m, "content": with_values(m["content"])} for m in messages]
    assert text == template.render(whole)
    for piece in pieces:
        if isinstance(piece, TextPiece) and piece.kind is PieceKind.CONSTANT:
            assert "{{" not in piece.text


@pytest.mark.parametrize(
    "shown", ["{{ m.content | tojson }}", "{{ m.content | upper }}", "", "{{ m.content[:9] }}"]
)
def test_a_template_that_changes_the_message_is_rejected(shown: str) -> None:
    template = ModelTemplate("{% for m in messages %}" + shown + "{% endfor %}")
    marked = mark_placeholders([{"role": "user", "content": "x {{a}} y"}], ["a"])
    with pytest.raises(InvalidRequest, match="changes or drops the message with `a`") as caught:
        put_variables(render_transcript(template, marked.prompt).pieces(), marked, VALUES)
    assert caught.value.param == "parrot.inputs.a"


def test_plain_text_may_have_placeholders() -> None:
    marked = mark_placeholders("<s>{{a}}{{b}} {{c}}{{a}}", ["a", "b"])
    assert isinstance(marked.prompt, str)
    pieces = put_variables([TextPiece(marked.prompt)], marked, VALUES)
    a, b = (VariablePiece(VALUES[name]) for name in NAMES)
    assert pieces == [TextPiece("<s>"), a, b, TextPiece(" {{c}}"), a]


def test_a_prompt_without_inputs_stays_as_it_is() -> None:
    messages = [{"role": "user", "content": "{{a}}"}, {"role": "user", "content": None}]
    marked = mark_placeholders(messages, [])
    assert marked.prompt == messages
    piece = TextPiece("{{a}}")
    assert put_variables([piece], marked, {}) == [piece]
