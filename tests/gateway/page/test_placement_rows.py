"""The page's view of placement, with a real scheduler and two engines."""

from parrot.gateway.page.rows import PageRows
from parrot.gateway.page.visitors import Visitor
from tests.serve.execution.test_result_cache import World

OPERATOR = Visitor(tenant=None, sees_values=True)


async def test_decisions_name_the_compared_engines_and_prefixes_their_engine() -> None:
    world = World(graph_group=False, ctx_group=False)
    for name in ("e0", "e1"):
        await world.join(name)
    mine, other = world.program("k1"), world.program("k2")
    for program in (mine, other):
        read = program.read(program.call())
        await world.settle()
        await read
    rows = PageRows(world.core)
    everything = dict(rows.placement(OPERATOR))
    decisions = [row for key, row in everything.items() if key.startswith("decision:")]
    contexts = [row for key, row in everything.items() if key.startswith("context:")]
    assert len(decisions) == 2
    for decision in decisions:
        engines = {other["engine"]: other["seconds"] for other in decision["compared"]}
        assert engines.keys() == {"e0", "e1"}
        assert engines[decision["engine"]] == min(engines.values())
        assert 0 < decision["to_compute"] <= decision["prompt_tokens"]
    assert contexts
    assert {row["engine"] for row in contexts} <= {"e0", "e1"}
    assert {row["head"] for row in contexts} == {"Ask", "same"}
    blind = rows.placement(Visitor(tenant=None, sees_values=False))
    assert blind.keys() == everything.keys()
    assert not any("head" in row for row in blind.values())
    for row in contexts:
        assert row["parent"] is None or f"context:{row['parent']}" in everything
        assert 0 <= row["own_tokens"] <= row["tokens"]

    session = world.core.sessions.find(mine.scope["session_id"])
    assert session is not None
    seen = rows.placement(Visitor(session.tenant, sees_values=True))
    theirs = {row["session"] for key, row in seen.items() if key.startswith("decision:")}
    assert theirs == {session.id}
    assert 0 < sum(key.startswith("context:") for key in seen) < len(contexts)
    assert all("head" in row for key, row in seen.items() if key.startswith("context:"))
    mine.end()
    other.end()
    await world.settle()
    await world.core.close()
