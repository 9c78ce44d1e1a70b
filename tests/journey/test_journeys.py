"""No journey grows, because a reader of a call must know all code of its journey.

Code of a feature that is off does not run."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BUDGETS = tomllib.loads(Path(__file__).with_name("budgets.toml").read_text())


@pytest.fixture(scope="module")
def measured() -> Any:
    """Measured in a process of its own, because objects of other tests change a journey."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.journey", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", BUDGETS["journeys"])
def test_no_journey_grows(name: str, measured: Any) -> None:
    journey, budget = measured["journeys"][name], BUDGETS["journeys"][name]
    counts = {
        "modules": len(journey["modules"]),
        "stateful": len(journey["stateful"]),
        "calls": journey["calls"],
    }
    over = {what: count for what, count in counts.items() if count > budget[what]}
    listed = "\n".join([*journey["modules"], *journey["stateful"]])
    assert not over, f"more than {budget}: {over}\n{listed}"


@pytest.mark.parametrize("name", BUDGETS["absent"])
def test_what_is_off_is_not_on_the_way(name: str, measured: Any) -> None:
    """Files that are not counted (`utils/`) can be absent wings, too."""
    wings = tuple(BUDGETS["absent"][name])
    assert not [path for path in measured["journeys"][name]["files"] if path.startswith(wings)]


def test_every_absent_wing_exists() -> None:
    """A wing that was moved or deleted would be absent from every journey."""
    wings = {wing for wings in BUDGETS["absent"].values() for wing in wings}
    missing = [wing for wing in wings if not list((ROOT / "parrot").glob(f"{wing}*"))]
    assert not missing


def test_few_public_attributes_are_methods_of_other_objects(measured: Any) -> None:
    assert len(measured["borrowed"]) <= BUDGETS["borrowed"], measured["borrowed"]


def test_the_page_shows_the_way_as_it_is(measured: Any) -> None:
    """Else: python -m tests.journey --write"""
    assert (ROOT / "docs" / "internals" / "architecture.md").read_text() == measured["page"]
