"""Random programs submit, read, cancel and abandon calls while engines come and go. Every value
equals that of a sequential run, every read ends, and everything is freed.

A long run: `PARROT_EXAMPLES=5000 pytest tests/e2e/test_random_programs.py`."""

import logging
import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parrot.simulation import run_virtual
from tests.e2e.random_programs import tell
from tests.e2e.sequential_reference import Output, Place, Reference
from tests.support.examples import examples

NUM_EXAMPLES = int(os.environ.get("PARROT_EXAMPLES", examples(36)))
TIMEOUT_S = 3.5 * NUM_EXAMPLES


@pytest.fixture(autouse=True)
def no_defects(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if a defect was caught and logged."""
    yield
    errors = [record.getMessage() for record in caplog.get_records("call") if is_defect(record)]
    assert not errors


def is_defect(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@pytest.mark.timeout(TIMEOUT_S)
@settings(
    max_examples=NUM_EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.randoms(use_true_random=False), st.integers(1, 80))
def test_random_programs(rng: random.Random, num_steps: int) -> None:
    run_virtual(tell(rng, num_steps))


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("seed", range(max(1, NUM_EXAMPLES * 2 // 3)))
def test_long_random_programs(seed: int) -> None:
    """Hypothesis prefers short examples, so this test runs long ones."""
    run_virtual(tell(random.Random(seed), 150))


def test_the_reference_computes_in_order() -> None:
    reference = Reference()
    reference.rules["x"] = "value"
    reference.rules["y"] = Output(("A ", Place("x"), " then "), 3)
    reference.rules["z"] = Output(("A value then ",), 3)
    assert reference.value("y") == reference.value("z")
    assert len(reference.value("y")) == 3
    assert reference.needs("y") == {"x", "y"}
