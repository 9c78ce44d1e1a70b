import itertools

from hypothesis import given
from hypothesis import strategies as st

from parrot.protocol.template import Placeholder, parse_template, placeholder
from parrot.protocol.template import TemplateText as Text

names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]*", fullmatch=True)


def test_pieces_are_in_order() -> None:
    assert list(parse_template("a {{x}}{{y_1}} b")) == [
        Text("a "),
        Placeholder("x"),
        Placeholder("y_1"),
        Text(" b"),
    ]


def test_invalid_placeholders_stay_text() -> None:
    for text in ("{{1x}}", "{{ x }}", "{x}", "{{x}", "{{}}", "{{x-y}}", '{"a": {"b": 1}}'):
        assert list(parse_template(text)) == [Text(text)]
    assert list(parse_template("")) == []


@given(st.lists(st.one_of(names.map(Placeholder), st.text(min_size=1).map(Text))))
def test_parsing_loses_nothing(pieces: list[Text | Placeholder]) -> None:
    template = "".join(p.text if isinstance(p, Text) else placeholder(p.name) for p in pieces)
    parsed = list(parse_template(template))
    rebuilt = "".join(p.text if isinstance(p, Text) else placeholder(p.name) for p in parsed)
    assert rebuilt == template
    assert all(p.text for p in parsed if isinstance(p, Text))
    assert not any(
        isinstance(a, Text) and isinstance(b, Text) for a, b in itertools.pairwise(parsed)
    )
