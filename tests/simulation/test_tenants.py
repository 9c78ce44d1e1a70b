"""One tenant's chat in parallel with many background calls of another tenant, simulated."""

from benchmark.serve.bench_tenants import Scene, compare, play
from benchmark.simulated import ENGINES, sim_engine


def test_background_calls_hardly_slow_down_a_chat() -> None:
    engine = sim_engine(ENGINES / "sim_llama_3_1_8b.json")
    alone, together = (
        play(Scene(engine, 1, crowd, "latency", query=1000, think_s=0.5, turns=3, settle_s=4.5))
        for crowd in (0, 600)
    )
    row = compare(alone, together)
    assert row["first_p99_ratio"] <= 1.3, row
    assert row["token_p99_ratio"] <= 1.3, row
    assert together.crowd_tokens > 1000
