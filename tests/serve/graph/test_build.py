import pytest
from hypothesis import given as fuzz
from hypothesis import strategies as st

from parrot.protocol.errors import AlreadySet, Conflict, InvalidRequest, NotFound, ParrotError
from parrot.protocol.public import CallResponse, GraphRequest
from parrot.protocol.template import placeholder
from parrot.serve.graph.graph import SessionGraph
from parrot.serve.graph.nodes import Completion, Piece, TextPiece, VariablePiece
from tests.serve.graph.held_runner import HeldRunner, add_reader, make_graph, prompt_of
from tests.support.requests import given, made, native, semantic, taken, var_ids


def completions(graph: SessionGraph, request_id: int) -> list[Completion]:
    tasks = list(graph.calls[request_id].tasks)
    assert all(isinstance(task, Completion) for task in tasks)
    return tasks


def render(completion: Completion) -> str:
    """The prompt with variables as <name>."""
    return "".join(
        piece.text if isinstance(piece, TextPiece) else f"<{piece.variable.name}>"
        for piece in prompt_of(completion)
    )


def test_a_call_with_two_outputs_is_two_completions_in_order() -> None:
    graph = make_graph()
    request = semantic(
        "A {{x}} B {{y}} C {{z}} D", given("x", "in"), made("y"), made("z", max_gen_length=3)
    )
    response = graph.submit(request)
    first, second = completions(graph, response.request_id)
    assert render(first) == "A <x> B "
    assert render(second) == "A <x> B <y> C "
    assert second.previous is first
    assert first.previous is None
    assert (first.output.name, second.output.name) == ("y", "z")
    assert second.sampling.max_gen_length == 3
    assert first.options.tenant == "tenant"
    assert list(second.inputs) == [first.output]


def test_param_info_lists_every_parameter_with_its_variable() -> None:
    graph = make_graph()
    known = graph.add_variable("known")
    response = graph.submit(
        semantic("{{a}}{{b}} {{y}}", given("a", "1"), taken("b", known.id), made("y"))
    )
    infos = [(p.parameter_name, p.is_output, p.var_name) for p in response.param_info]
    assert infos == [("a", False, "a"), ("b", False, "known"), ("y", True, "y")]
    ids = var_ids(response)
    assert graph.variable(ids["a"]).text == "1"
    assert ids["b"] == known.id
    assert graph.variable(ids["y"]).producer is graph.calls[response.request_id].tasks[0]


def test_a_value_that_looks_like_a_placeholder_stays_text() -> None:
    graph = make_graph()
    response = graph.submit(semantic("say {{a}}: {{y}}", given("a", "{{y}}{{a}}"), made("y")))
    (completion,) = completions(graph, response.request_id)
    _, piece, _ = completion.fill
    assert isinstance(piece, VariablePiece)
    assert piece.variable.text == "{{y}}{{a}}"


def test_text_after_the_last_output_is_dropped_unless_kept_for_a_successor() -> None:
    graph = make_graph()
    dropped = graph.submit(semantic("a {{y}} end", made("y")))
    kept = graph.submit(semantic("b {{y}} end", made("y"), remove_pure_fill=False))
    for before, prompt in ((dropped, "a <y>go "), (kept, "b <y> endgo ")):
        after = graph.submit(semantic("go {{z}}", made("z"), successor_of=before.request_id))
        (completion,) = completions(graph, after.request_id)
        assert render(completion) == prompt


def test_a_call_without_outputs_is_context_for_its_successor() -> None:
    graph = make_graph()
    system = graph.submit(semantic("You are {{who}}. ", given("who", "a cat")))
    assert graph.calls[system.request_id].tasks == ()
    after = graph.submit(semantic("{{z}}", made("z"), successor_of=system.request_id))
    (completion,) = completions(graph, after.request_id)
    assert render(completion) == "You are <who>. "
    third = graph.submit(semantic(" More: {{w}}", made("w"), successor_of=after.request_id))
    (completion,) = completions(graph, third.request_id)
    assert render(completion) == "You are <who>. <z> More: "


def test_a_premade_variable_can_be_an_output_and_known_to_consumers_before() -> None:
    runner = HeldRunner()
    graph = make_graph(runner)
    premade = graph.add_variable("premade")
    later = graph.submit(semantic("use {{a}}: {{y}}", taken("a", premade.id), made("y")))
    graph.submit(semantic("make {{out}}", made("out", premade.id)))
    add_reader(graph, graph.variable(var_ids(later)["y"]), "latency")
    assert runner.names() == ["premade"]
    runner.finish(runner.started[0])
    assert runner.names() == ["y"]


BAD_CALLS = [
    ("{{y}} a", [made("y")], "y", "very first"),
    ("a {{y}}{{z}}", [made("y"), made("z")], "z", "follows another"),
    ("a {{y}} b {{y}}", [made("y")], "y", "twice"),
    ("a {{x}} {{y}}", [made("y")], "x", "no parameter"),
    ("a {{y}}", [made("y"), made("z")], "z", "does not occur"),
    ("a {{y}}", [made("y"), given("y", "1")], "y", "twice"),
]


@pytest.mark.parametrize(("template", "parameters", "param", "reason"), BAD_CALLS)
def test_a_contradictory_call_is_rejected_by_name(
    template: str, parameters: list[dict[str, object]], param: str, reason: str
) -> None:
    graph = make_graph()
    with pytest.raises(InvalidRequest, match=reason) as caught:
        graph.submit(semantic(template, *parameters))
    assert caught.value.param == param
    assert param in caught.value.message
    assert not graph.variables
    assert not graph.calls


def test_rejected_bindings_leave_the_graph_unchanged() -> None:
    graph = make_graph()
    done = graph.add_variable("done", "text")
    empty = graph.add_variable("empty")
    busy = var_ids(graph.submit(semantic("a {{y}}", made("y"))))["y"]
    before = set(graph.variables), set(graph.calls)
    cases: list[tuple[type[ParrotError], list[dict[str, object]]]] = [
        (NotFound, [made("y", "nowhere"), made("z")]),
        (NotFound, [taken("y", "nowhere"), made("z")]),
        (AlreadySet, [made("y", done.id), made("z")]),
        (Conflict, [made("y", busy), made("z")]),
        (InvalidRequest, [made("y", empty.id), made("z", empty.id)]),
    ]
    for error, parameters in cases:
        with pytest.raises(error):
            graph.submit(semantic("a {{y}} b {{z}}", *parameters))
    assert (set(graph.variables), set(graph.calls)) == before
    assert empty.producer is None
    graph.check_integrity()


def test_a_native_call_needs_an_output_and_has_no_context() -> None:
    graph = make_graph()
    with pytest.raises(InvalidRequest, match="no output"):
        graph.submit(native("f", given("a", "1")))
    response = graph.submit(native("f", given("a", "1"), made("o")))
    with pytest.raises(InvalidRequest, match="no context"):
        graph.submit(semantic("x {{y}}", made("y"), successor_of=response.request_id))
    with pytest.raises(NotFound):
        graph.submit(semantic("x {{y}}", made("y"), successor_of=99))


def test_an_idempotency_key_replays_the_answer() -> None:
    graph = make_graph()
    request = semantic("a {{y}}", made("y"), idempotency_key="k", session_auth="one")
    response = CallResponse(request_id=1, param_info=[])
    graph.remember(request, response)
    again = request.model_copy(update={"session_auth": "two"})
    assert graph.answered(again, CallResponse) == response
    for other in (
        semantic("b {{y}}", made("y"), idempotency_key="k"),
        native("a", made("y"), idempotency_key="k"),
        GraphRequest(session_id=request.session_id, idempotency_key="k"),
    ):
        with pytest.raises(Conflict, match="idempotency"):
            graph.answered(other, CallResponse)
    new = semantic("a {{y}}", made("y"), idempotency_key="new")
    assert graph.answered(new, CallResponse) is None
    assert graph.answered(semantic("a {{y}}", made("y")), CallResponse) is None


@fuzz(
    st.lists(
        st.one_of(
            st.text(min_size=1, max_size=5).map(lambda text: text.replace("{", "(")),
            st.sampled_from(["a", "b"]).map(placeholder),
        ),
        max_size=8,
    ),
    st.integers(0, 3),
)
def test_splitting_a_template_loses_no_piece(pieces: list[str], num_outputs: int) -> None:
    """The fills and the part for a successor, joined again, are equal to the template."""
    template = "".join(
        "".join(pieces) + "." + placeholder(f"out{n}") for n in range(num_outputs)
    ) + "".join(pieces)
    parameters = [given("a", "1"), given("b", "2"), *(made(f"out{n}") for n in range(num_outputs))]
    graph = make_graph()
    response = graph.submit(semantic(template, *parameters, remove_pure_fill=False))
    call = graph.calls[response.request_id]
    assert call.successor is not None
    joined: list[Piece] = []
    for completion in completions(graph, response.request_id):
        joined += [*completion.fill, VariablePiece(completion.output)]
    joined += call.successor.tail
    assert template == "".join(
        piece.text if isinstance(piece, TextPiece) else placeholder(piece.variable.name)
        for piece in joined
    )
