"""`parrot keys`: the file of API keys, their tenants, and what these may have."""

from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

keys = typer.Typer(no_args_is_help=True, help="The file of API keys, ServeCore's `keys_file`.")

FileOption = Annotated[
    Path, typer.Option("--file", envvar="PARROT_KEYS_FILE", help="The file, JSON or YAML.")
]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The tenant's name.")]


@keys.command("add")
def add(
    tenant: IdArgument,
    file: FileOption,
    scope: Annotated[
        list[str] | None, typer.Option(help="user (default), admin or metrics; several times.")
    ] = None,
    weight: Annotated[float | None, typer.Option(help="Its share beside other tenants'.")] = None,
    share_group: Annotated[
        str | None, typer.Option("--share_group", help="With whom it shares what is cached.")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="As tokens_per_minute=100000; several times."),
    ] = None,
) -> None:
    """Make a key and show it, this once: the file keeps its digest only."""
    from parrot.cli.console import ERR, fail
    from parrot.serve.tenants.keys_file import add_key
    from parrot.utils.config import ConfigError

    given = {"scopes": scope, "weight": weight, "share_group": share_group}
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        key = add_key(file, {"id": tenant, **fields, "limits": _limits(limit or [])})
    except ConfigError as error:
        fail(str(error))
    ERR.print(f"The key of {tenant}. It is shown this once: {file} has only its digest.")
    typer.echo(key)


@keys.command("list")
def list_keys(file: FileOption) -> None:
    """Show the tenants, and what they may do and have."""
    from rich.table import Table

    from parrot.cli.console import OUT, fail
    from parrot.serve.tenants.table import read_keys
    from parrot.utils.config import ConfigError

    try:
        entries = read_keys(str(file))
    except ConfigError as error:
        fail(str(error))
    table = Table("id", "scopes", "weight", "share group", "limits", box=None)
    for entry in entries:
        limits = entry.limits.model_dump(exclude_none=True).items()
        shown = ", ".join(f"{name}={number}" for name, number in limits)
        scopes, group = ", ".join(entry.scopes), entry.share_group or ""
        table.add_row(entry.id, scopes, f"{entry.weight:g}", group, shown)
    OUT.print(table)


@keys.command("remove")
def remove(tenant: IdArgument, file: FileOption) -> None:
    """Remove a key. A ServeCore that runs refuses it within seconds, and ends its sessions."""
    from parrot.cli.console import fail
    from parrot.serve.tenants.keys_file import remove_key
    from parrot.utils.config import ConfigError

    try:
        remove_key(file, tenant)
    except ConfigError as error:
        fail(str(error))


def _limits(given: list[str]) -> dict[str, Any]:
    """The limits that options name; what is wrong with a value is found later."""
    limits: dict[str, Any] = {}
    for text in given:
        name, _, number = text.partition("=")
        try:
            limits[name] = orjson.loads(number)
        except orjson.JSONDecodeError:
            limits[name] = number
    return limits
