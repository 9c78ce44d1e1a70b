"""Prometheus' own checks of what we write for it."""

import shutil
import subprocess

import pytest

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus"
)


def promtool(*args: str, stdin: bytes | None = None) -> None:
    """Run `promtool check`, which must find nothing."""
    result = subprocess.run(
        ["promtool", "check", *args], input=stdin, capture_output=True, timeout=30, check=False
    )
    found = (result.stdout + result.stderr).decode()
    assert result.returncode == 0, found
    if args == ("metrics",):
        assert not found
