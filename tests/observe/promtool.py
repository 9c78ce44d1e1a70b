"""Run Prometheus' checks on our metrics, alerts and configurations."""

import subprocess

from tests.support.programs import program


def promtool(*args: str, stdin: bytes | None = None) -> None:
    """Run `promtool check`, and require that it finds nothing."""
    command = [program("prometheus", "promtool"), "check", *args]
    result = subprocess.run(command, input=stdin, capture_output=True, timeout=30, check=False)
    found = (result.stdout + result.stderr).decode()
    assert result.returncode == 0, found
    if args == ("metrics",):
        assert not found
