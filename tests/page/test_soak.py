"""A few rounds of the soak test of the page. `python -m benchmark.soak.soak_page` runs for
hours."""

from benchmark.soak.soak_page import ENGINE, run_soak
from parrot.cluster import Cluster
from tests.support.programs import chromium


async def test_no_update_is_lost_while_connections_break_and_engines_drain() -> None:
    chromium()  # skips the test if there is no browser
    with Cluster(engines=[ENGINE] * 2) as cluster:
        found = await run_soak(cluster, minutes=0.05)
    assert found["rounds"] >= 2
    assert found["connections_cut"] > 0
    assert found["errors"] == []
