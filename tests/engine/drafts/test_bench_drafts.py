"""The gain of drafts on a device in virtual time: large for repeated text, and no loss for new
text."""

import argparse
import random

import pytest

pytest.importorskip("torch")

from benchmark.engine import bench_drafts
from benchmark.engine.drafting.edit_pairs import EditPair

LENGTH = 120


@pytest.fixture(scope="module")
def bench() -> bench_drafts.Bench:
    parser = argparse.ArgumentParser()
    bench_drafts.arguments(parser)
    wanted = ["-", "--simulate", "--repeats", "1", "--length", str(LENGTH)]
    return bench_drafts.Bench(parser.parse_args(wanted))


def pairs(count: int) -> list[EditPair]:
    """Texts with few words, so that the same three words often follow each other."""
    numbers = random.Random(7)
    words = [f"{numbers.randrange(1000)}{letter}" for letter in "abcdefghijklm"]
    found = []
    for number in range(count):
        before = numbers.choices(words, k=60)
        after = [*before[:20], "edited", *before[22:]]
        found.append(
            EditPair(str(number), f"{number}.py", "Edit", " ".join(before), " ".join(after))
        )
    return found


@pytest.mark.parametrize(("batch", "least"), [(1, 4.0), (4, 3.0), (16, 1.6), (64, 1.0)])
def test_edits_are_faster(bench: bench_drafts.Bench, batch: int, least: float) -> None:
    row = bench.row(pairs(batch), "edit", batch)
    assert row["speedup"] > least
    assert row["acceptance"] > 0.7


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
def test_new_text_is_not_slower(bench: bench_drafts.Bench, batch: int) -> None:
    assert bench.row(pairs(batch + 7), "new", batch)["speedup"] > 0.98


def test_an_application_that_edits_is_faster(bench: bench_drafts.Bench) -> None:
    row = bench.application(pairs(1), "refine_loop")
    assert row["speedup"] > 1.8
