"""`parrot keys`: the file of API keys, with their tenants, scopes and limits."""

from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

keys = typer.Typer(no_args_is_help=True, help="Manage the file of API keys (`keys_file`).")

FileOption = Annotated[
    Path, typer.Option("--file", envvar="PARROT_KEYS_FILE", help="Key file, JSON or YAML.")
]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Name of the tenant.")]


@keys.command("add")
def add(
    tenant: IdArgument,
    file: FileOption,
    scope: Annotated[
        list[str] | None, typer.Option(help="user (default), admin or metrics. Can be repeated.")
    ] = None,
    weight: Annotated[
        float | None, typer.Option(help="Share relative to other tenants. \\[default: 1]")
    ] = None,
    share_group: Annotated[
        str | None, typer.Option("--share-group", help="Tenants with the same group share caches.")
    ] = None,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Keep no finished runs of the tenant for the page.")
    ] = False,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER", help="A limit such as tokens_per_minute=100000. Can be repeated."
        ),
    ] = None,
) -> None:
    """Create a key and print it once. The file stores its digest only."""
    from parrot.cli.console import ERR, fail
    from parrot.serve.tenants.keys_file import add_key
    from parrot.utils.config import ConfigError

    given = {"scopes": scope, "weight": weight, "share_group": share_group}
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if no_history:
        fields["history"] = False
    try:
        key = add_key(file, {"id": tenant, **fields, "limits": _limits(limit or [])})
    except ConfigError as error:
        fail(str(error))
    ERR.print(f"The key of {tenant}, printed only once: {file} stores its digest.")
    typer.echo(key)


@keys.command("list")
def list_keys(file: FileOption) -> None:
    """List tenants with their scopes and limits."""
    from rich.table import Table

    from parrot.cli.console import OUT, fail
    from parrot.serve.tenants.table import read_keys
    from parrot.utils.config import ConfigError

    try:
        entries = read_keys(str(file))
    except ConfigError as error:
        fail(str(error))
    table = Table("id", "scopes", "weight", "share group", "history", "limits", box=None)
    for entry in entries:
        limits = entry.limits.model_dump(exclude_none=True).items()
        shown = ", ".join(f"{name}={number}" for name, number in limits)
        scopes, group = ", ".join(entry.scopes), entry.share_group or ""
        history = "on" if entry.history else "off"
        table.add_row(entry.id, scopes, f"{entry.weight:g}", group, history, shown)
    OUT.print(table)


@keys.command("remove")
def remove(tenant: IdArgument, file: FileOption) -> None:
    """Remove a key. A running server rejects it within 2 s and ends its sessions."""
    from parrot.cli.console import fail
    from parrot.serve.tenants.keys_file import remove_key
    from parrot.utils.config import ConfigError

    try:
        remove_key(file, tenant)
    except ConfigError as error:
        fail(str(error))


def _limits(given: list[str]) -> dict[str, Any]:
    """The limits from the options. Values are validated later."""
    limits: dict[str, Any] = {}
    for text in given:
        name, _, number = text.partition("=")
        try:
            limits[name] = orjson.loads(number)
        except orjson.JSONDecodeError:
            limits[name] = number
    return limits
