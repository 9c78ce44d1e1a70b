"""A short soak test that counts objects instead of memory.

`python -m benchmark.soak.soak_sessions` is the long test."""

import re
from collections import Counter
from pathlib import Path

from benchmark.soak.programs import MIX
from benchmark.soak.soak_sessions import opened
from benchmark.soak.tables import grown, table_sizes


def tables_of_programs() -> Counter[str]:
    """Return the sizes of all tables without histograms and the event log, which keep some entries
    after their first use."""
    others = re.compile(r"Histogram|^utils\.metrics|^gateway\.page\.event_log\.")
    found = table_sizes()
    return Counter({name: n for name, n in found.items() if not others.search(name)})


async def test_nothing_is_left_of_programs(tmp_path: Path) -> None:
    """`run` waits until there are no sessions, contexts, used blocks and timers."""
    async with opened(16, 80, tmp_path / "journal.db") as service:
        await service.run(160)
        tables, num_bytes = tables_of_programs(), service.journal_bytes()
        await service.run(320)
        assert service.counts.keys() >= {program.__name__ for program in MIX}
        left = grown(tables, tables_of_programs())
        assert not left
        assert service.journal_bytes() < 1.2 * num_bytes


def test_a_table_that_grows_is_named() -> None:
    class Registry:
        def __init__(self) -> None:
            self.entries: dict[int, str] = {}

    registry = Registry()
    before = table_sizes(__name__)
    registry.entries |= dict.fromkeys(range(1000), "entry")
    [(name, counts)] = grown(before, table_sizes(__name__)).items()
    assert name.endswith("Registry.entries")
    assert counts == (0, 1000)
    assert not grown(Counter(a=1000), Counter(a=1200))
