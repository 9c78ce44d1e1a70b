"""The answers of the embedded model with its default sampling make sense."""

from collections.abc import Iterator

import pytest

from benchmark.first_answers import SEEDS, ask_all, read_questions
from parrot.cluster import Cluster
from tests.support.command import parrot


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(engines=[{"model": "embedded"}]) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_four_of_five_answers_contain_the_expected_word(cluster: Cluster) -> None:
    answers = await ask_all(cluster.core_url)
    assert len(answers) == len(read_questions()) * len(SEEDS) == 40
    senseless = [answer for answer in answers if not answer.makes_sense]
    assert len(senseless) <= 8, senseless


def test_ping_shows_the_default_sampling(cluster: Cluster) -> None:
    shown = parrot("ping", "--core", cluster.core_url)
    line = "Default sampling of embedded: temperature 0.2, top_p 0.9, repetition_penalty 1.1"
    assert line in shown.stdout
