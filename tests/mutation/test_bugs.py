"""The list of bugs fits the code, so that `check.py` can be run at any time."""

from collections import Counter
from pathlib import Path

import pytest

from tests.mutation.check import ROOT, Bug, read_bugs

BUGS = read_bugs()


def test_there_are_at_least_a_hundred_different_bugs() -> None:
    assert len(BUGS) >= 100
    twice = [
        bug for bug, count in Counter((b.file, b.old, b.new) for b in BUGS).items() if count > 1
    ]
    assert twice == []


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{Path(bug.file).stem}: {bug.what}")
def test_each_bug_can_be_put_in(bug: Bug, tmp_path: Path) -> None:
    copy = tmp_path / bug.file
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / bug.file).read_text())
    assert bug.put_into(tmp_path) != copy.read_text()
    for test in bug.tests:
        assert (ROOT / test.partition("::")[0]).exists(), test
