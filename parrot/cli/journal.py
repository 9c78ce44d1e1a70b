"""`parrot journal`: checks, copies, restores and compacts the journal file of a ServeCore."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from parrot.journal.tools import Findings

journal = typer.Typer(no_args_is_help=True, help="Check, back up, restore and compact a journal.")

JournalArgument = Annotated[
    Path, typer.Argument(metavar="JOURNAL", help="The file that `journal` in the config names.")
]
CopyArgument = Annotated[Path, typer.Argument(metavar="COPY", help="The file of the copy.")]


@journal.command("check")
def check_file(path: JournalArgument) -> None:
    """Read all records and verify them. ServeCore may run. The exit status is 1 for damage."""
    from parrot.cli.console import fail
    from parrot.journal.tools import check

    with _failing():
        findings = check(path)
    _show(findings)
    if findings.damage:
        fail(f"{path} is damaged:\n" + "\n".join(findings.damage))


@journal.command("backup")
def back_up(path: JournalArgument, copy: CopyArgument) -> None:
    """Copy the journal to a new file, with mode 600. ServeCore may run."""
    from parrot.journal.tools import backup

    with _failing():
        findings = backup(path, copy)
    _show(findings)


@journal.command("restore")
def restore_copy(copy: CopyArgument, path: JournalArgument) -> None:
    """Replace the journal with a copy. ServeCore must be stopped. The replaced journal is kept in
    the same folder."""
    from parrot.cli.console import OUT
    from parrot.journal.tools import restore

    with _failing():
        aside = restore(copy, path)
    if aside is not None:
        OUT.print(f"The replaced journal is {aside}", soft_wrap=True)


@journal.command("compact")
def compact_file(path: JournalArgument) -> None:
    """Remove the records of ended sessions and shrink the file. ServeCore must be stopped."""
    from parrot.cli.console import OUT
    from parrot.journal.tools import compact

    with _failing():
        before, after = compact(path)
    OUT.print(f"{before} bytes before, {after} bytes now")


@contextmanager
def _failing() -> Iterator[None]:
    from parrot.cli.console import fail
    from parrot.utils.config import ConfigError

    try:
        yield
    except ConfigError as error:
        fail(str(error))


def _show(findings: "Findings") -> None:
    from parrot.cli.console import OUT

    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(findings.kinds.items()))
    OUT.print(f"schema version {findings.schema}, {findings.num_bytes} bytes", end="")
    OUT.print(f" ({findings.num_free_bytes} free)")
    OUT.print(f"{findings.kinds.total()} records: {kinds}", soft_wrap=True)
    OUT.print(f"{findings.num_live} live and {findings.num_ended} ended sessions and responses")
    if findings.first_at is not None and findings.last_at is not None:
        first, last = map(datetime.fromtimestamp, (findings.first_at, findings.last_at))
        OUT.print(f"from {first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S}")
