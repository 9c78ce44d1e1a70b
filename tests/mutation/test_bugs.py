"""All bugs in `bugs.toml` fit the code, so that `check.py` can run at any time."""

from collections import Counter

import pytest

from tests.mutation.check import ROOT, Bug, package_sources, read_bugs

BUGS = read_bugs()


def test_there_are_at_least_a_hundred_different_bugs() -> None:
    assert len(BUGS) >= 100
    twice = [
        bug for bug, count in Counter((b.within, b.old, b.new) for b in BUGS).items() if count > 1
    ]
    assert twice == []


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_each_bug_can_be_inserted(bug: Bug) -> None:
    path, mistaken = bug.applied_to(package_sources())
    assert mistaken != package_sources()[path]
    for test in bug.tests:
        assert (ROOT / test.partition("::")[0]).exists(), test


SOURCES = {
    "parrot/a.py": "class A:\n    def f(self):\n        x = 1\n",
    "parrot/b.py": "def g():\n    x = 1\n\n\ny = 1\n",
}


def test_the_file_of_a_bug_is_found() -> None:
    path, mistaken = Bug("", "y = 1", "y = 2", ()).applied_to(SOURCES)
    assert (path, mistaken) == ("parrot/b.py", SOURCES["parrot/b.py"].replace("y = 1", "y = 2"))
    path, mistaken = Bug("", "x = 1", "x = 2", (), within="f").applied_to(SOURCES)
    assert (path, mistaken) == ("parrot/a.py", SOURCES["parrot/a.py"].replace("x = 1", "x = 2"))


@pytest.mark.parametrize(
    ("bug", "place"),
    [
        (Bug("", "x = 1", "x = 2", ()), "parrot/a.py, parrot/b.py"),
        (Bug("", "x = 1", "x = 2", (), within="A"), "nowhere"),
        (Bug("", "z = 1", "z = 2", ()), "nowhere"),
    ],
)
def test_a_bug_whose_text_is_not_unique_is_rejected(bug: Bug, place: str) -> None:
    with pytest.raises(ValueError, match=place):
        bug.applied_to(SOURCES)
