"""Run the tests of the garbage collector in a separate process, because they unfreeze all objects,
and a collection of the modules of all tests takes 1 s."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
CASES = [TESTS / "utils/collector_cases.py", TESTS / "server/standby_turn_cases.py"]


def test_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "pytest", *CASES, "-n", "0", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
