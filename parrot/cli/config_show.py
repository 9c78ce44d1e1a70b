"""`parrot config show`: the values that servers would use, and the source of each value."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel
from rich.markup import escape
from rich.table import Column, Table

from parrot.cli.console import OUT, fail
from parrot.engine.config import engine_settings, parse_engine_config
from parrot.launch.configs import is_engine_config
from parrot.serve.config import CoreConfig, core_settings
from parrot.utils.config import ConfigError, Loc, parse_config
from parrot.utils.settings import DEFAULT, Settings, file_layer

_HIDDEN = "(set, not shown)"
_PASSWORD = re.compile(r"""(://[^:@/"]*:|[?&]password=)[^@/"&]*(@|&|")""")  # In a URL.


def show_config(path: Path | None, options: dict[str, Any], only_set: bool) -> None:
    """Print a table for the server of the config file. Without a file, print tables for ServeCore
    and engines. Raises `SystemExit` for an invalid value."""
    try:
        file = file_layer(path)
        if "engines" in file.values:
            fail(
                f"{path} is a launch file; give one of its configs instead, or check the whole "
                "file with `parrot doctor`"
            )
        is_engine = is_engine_config(file.values)
        if path is None or not is_engine:
            settings = core_settings(file, options, os.environ)
            core = parse_config(CoreConfig, settings.payload, settings.blamed)
            OUT.print(_table("ServeCore", core, settings, only_set))
        if path is None or is_engine:
            settings = engine_settings(file, options, os.environ)
            engine = parse_engine_config(settings.payload, settings.blamed)
            OUT.print(_table(f"an engine, {engine.engine_type}", engine, settings, only_set))
    except ConfigError as error:
        fail(str(error))


def _table(title: str, config: BaseModel, settings: Settings, only_set: bool) -> Table:
    columns = (Column(name, overflow="fold") for name in ("key", "value", "from"))
    table = Table(*columns, title=title, title_justify="left")
    for loc, value in _values(config, ()):
        origin = settings.origin(loc)
        if origin == DEFAULT and only_set:
            continue
        dim = "dim" if origin == DEFAULT else None
        table.add_row(escape(".".join(map(str, loc))), escape(value), escape(origin), style=dim)
    return table


def _values(section: BaseModel, loc: Loc) -> Iterator[tuple[Loc, str]]:
    """Yield (path, value as JSON) of all keys. Secrets are hidden."""
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, BaseModel):
            yield from _values(value, (*loc, key))
        elif value and not field.repr:
            yield (*loc, key), _HIDDEN
        else:
            yield (*loc, key), _PASSWORD.sub(r"\1***\2", orjson.dumps(value).decode())
