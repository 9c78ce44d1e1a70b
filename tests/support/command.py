"""Runs the `parrot` command inside the test process, which saves the time of its imports."""

import sys
from dataclasses import dataclass
from unittest.mock import patch

from typer.testing import CliRunner

from parrot.cli.app import app
from parrot.cli.console import ERR, OUT
from tests.support.root_logger import unchanged_root_logger

_WIDTH = 160


@dataclass(frozen=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


def parrot(*args: str, stdin: str = "", **env: str) -> Result:
    """Run the command with these arguments. Exceptions other than `SystemExit` are raised. `env` is
    added to the environment."""
    env = {"COLUMNS": str(_WIDTH), **env}
    with (
        unchanged_root_logger(),
        patch.object(OUT, "_width", _WIDTH),
        patch.object(ERR, "_width", _WIDTH),
        # The commands of servers replace the first argument.
        patch.object(sys, "argv", [*sys.argv]),
    ):
        result = CliRunner().invoke(app, args, input=stdin, env=env, prog_name="parrot")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Result(result.exit_code, result.stdout, result.stderr)


def failed(*args: str, stdin: str = "", **env: str) -> str:
    """The error output of a command that must fail."""
    result = parrot(*args, stdin=stdin, **env)
    assert result.returncode == 1, result.stdout + result.stderr
    return " ".join(result.stderr.split())
