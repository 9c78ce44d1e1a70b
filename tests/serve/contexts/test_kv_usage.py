"""What of engines' memory live sessions have."""

import pytest

from parrot.serve.contexts.index import KvUsage, PrefixIndex


@pytest.mark.parametrize(
    ("promised", "part"), [([], 0.0), ([(0, 100)], 0.0), ([(80, 100), (10, 300)], 0.225)]
)
def test_the_part_that_is_promised_is_of_all_engines(
    promised: list[tuple[int, int]], part: float
) -> None:
    index = PrefixIndex()
    for engine_id, (held, size) in enumerate(promised):
        index.kv_usage[engine_id] = KvUsage(size, size, held)
    assert index.session_fraction == pytest.approx(part)
