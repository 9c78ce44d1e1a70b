"""The layered layout of executed graphs, checked against properties of any valid layout."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.cli.graph_picture import Layout, layout

Edges = list[tuple[int, int]]


def crossings(result: Layout[int]) -> int:
    """Count the crossings of all pairs of drawn segments."""
    segments = [pair for path in result.paths.values() for pair in pairwise(path)]
    return sum(
        a[0][0] == b[0][0] and (a[0][1] - b[0][1]) * (a[1][1] - b[1][1]) < 0
        for i, a in enumerate(segments)
        for b in segments[i + 1 :]
    )


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[int], Edges]:
    """Draw graphs whose edges go from smaller to larger numbers, so they have no cycle."""
    num_nodes = draw(st.integers(1, 12))
    pairs = [(a, b) for a in range(num_nodes) for b in range(a + 1, num_nodes)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=24)) if pairs else []
    return draw(st.permutations(range(num_nodes))), edges


@given(graphs())
def test_every_layout_is_valid(graph: tuple[list[int], Edges]) -> None:
    nodes, edges = graph
    result = layout(nodes, edges)
    assert set(result.places) == set(nodes)
    assert set(result.paths) == set(edges)
    for (source, target), path in result.paths.items():
        assert path[0] == result.places[source]
        assert path[-1] == result.places[target]
        assert all(b[0] - a[0] == 1 for a, b in pairwise(path)), "one column at a time"
    taken = [*result.places.values(), *(p for path in result.paths.values() for p in path[1:-1])]
    assert len(set(taken)) == len(taken), "no two items at the same place"


@given(graphs())
def test_a_column_is_the_longest_path_to_the_node(graph: tuple[list[int], Edges]) -> None:
    import networkx as nx

    nodes, edges = graph
    oracle = nx.DiGraph(edges)
    oracle.add_nodes_from(nodes)
    for column, generation in enumerate(nx.topological_generations(oracle)):
        for node in generation:
            assert layout(nodes, edges).places[node][0] == column


@given(graphs())
def test_columns_are_centred(graph: tuple[list[int], Edges]) -> None:
    result = layout(*graph)
    points = {*result.places.values(), *(p for path in result.paths.values() for p in path)}
    for column in range(result.num_columns):
        rows = sorted(y for x, y in points if x == column)
        assert rows[0] == -rows[-1]
        assert all(b - a == 1 for a, b in pairwise(rows))


def test_map_reduce() -> None:
    result = layout([9, 0, 1, 2, 3], [(i, 9) for i in range(4)])
    assert result.places == {9: (1, 0), 0: (0, -1.5), 1: (0, -0.5), 2: (0, 0.5), 3: (0, 1.5)}
    assert (result.num_columns, result.height) == (2, 4)


def test_avoidable_crossings_are_avoided() -> None:
    nodes = [0, 1, 2, 10, 11, 12, 20, 21, 22]
    edges = [(0, 12), (1, 11), (2, 10), (10, 20), (11, 22), (12, 21)]
    assert crossings(layout(nodes, edges)) == 0


@given(graphs())
def test_sorting_never_adds_crossings(graph: tuple[list[int], Edges]) -> None:
    nodes, edges = graph
    import parrot.cli.graph_picture as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SWEEPS", 0)
        unsorted = layout(nodes, edges)
    assert crossings(layout(nodes, edges)) <= crossings(unsorted)


def test_long_edges_have_waypoints() -> None:
    result = layout(["a", "b", "c"], [("a", "b"), ("b", "c"), ("a", "c")])
    assert [x for x, _ in result.paths["a", "c"]] == [0, 1, 2]
    assert result.paths["a", "c"][1] != result.places["b"]


def test_empty_repeated_and_wrong() -> None:
    assert layout([], []).height == 0
    assert layout(["a", "b"], [("a", "b")] * 3).paths.keys() == {("a", "b")}
    with pytest.raises(ValueError, match="cycle"):
        layout([1, 2], [(1, 2), (2, 1)])
    with pytest.raises(ValueError, match="unknown node"):
        layout([1], [(1, 2)])
