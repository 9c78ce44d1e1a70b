"""Journeys do not grow, because an engineer must read all code of a journey to understand it.

Code of disabled features does not run."""

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
    """Measure in a separate process, because objects of other tests change a journey."""
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
def test_disabled_features_are_not_on_the_request_path(name: str, measured: Any) -> None:
    """Absent features may include files that are not counted, such as `utils/`."""
    absent = tuple(BUDGETS["absent"][name])
    assert not [path for path in measured["journeys"][name]["files"] if path.startswith(absent)]


def test_every_absent_path_exists() -> None:
    """A path that was moved or deleted would be absent from every journey."""
    paths = {path for group in BUDGETS["absent"].values() for path in group}
    missing = [path for path in paths if not list((ROOT / "parrot").glob(f"{path}*"))]
    assert not missing


def test_few_public_attributes_are_methods_of_other_objects(measured: Any) -> None:
    assert len(measured["borrowed"]) <= BUDGETS["borrowed"], measured["borrowed"]


def test_the_page_is_up_to_date(measured: Any) -> None:
    """If this fails, run `python -m tests.journey --write`."""
    assert (ROOT / "docs" / "internals" / "architecture.md").read_text() == measured["page"]
