"""The commands and the file of keys of docs/security.md."""

import subprocess
import sys
from pathlib import Path

from parrot.serve.tenants.table import read_keys
from tests.docs.pages import ROOT, blocks_of

BLOCKS = {
    block.language: block
    for block in blocks_of(ROOT / "docs" / "security.md")
    if block.tested_in == "tests/docs/test_keys.py"
}


def test_the_commands_run_one_after_the_other(tmp_path: Path) -> None:
    for line in BLOCKS["bash"].code.replace("/etc/parrot", str(tmp_path)).splitlines():
        _, *args = line.split()
        command = [sys.executable, "-m", "parrot.cli", *args]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
    ids = [entry.id for entry in read_keys(str(tmp_path / "keys.json"))]
    assert ids == ["operator1", "prometheus"]


def test_the_file_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(BLOCKS["yaml"].code)
    file.chmod(0o600)
    (entry,) = read_keys(str(file))
    assert entry.id == "acme"
