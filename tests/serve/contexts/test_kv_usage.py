"""The fraction of the engines' KV that live sessions use."""

import pytest

from parrot.serve.contexts.index import KvUsage, PrefixIndex


@pytest.mark.parametrize(
    ("promised", "part"), [([], 0.0), ([(0, 100)], 0.0), ([(80, 100), (10, 300)], 0.225)]
)
def test_the_fraction_of_sessions_counts_all_engines(
    promised: list[tuple[int, int]], part: float
) -> None:
    index = PrefixIndex()
    for engine_id, (held, size) in enumerate(promised):
        index.kv_usage[engine_id] = KvUsage(size, size, held)
    assert index.session_fraction == pytest.approx(part)
