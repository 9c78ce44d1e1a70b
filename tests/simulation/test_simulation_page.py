"""The example of docs/internals/simulation.md runs."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "internals" / "simulation.md").read_text()


def test_the_example(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    program = tmp_path / "program.py"
    program.write_text(source)
    result = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert 3601 < float(result.stdout.split()[0]) < 3604
