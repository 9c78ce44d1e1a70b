"""Parrot serves LLM applications. Programs begin with `from parrot import P`.

Type checkers read the names in __init__.pyi. An import here, even one for type checkers only, would
make the front end a dependency of every module of this package."""

from importlib import import_module
from typing import Any

__all__ = ["P", "errors"]


def __getattr__(name: str) -> Any:
    """Imported on first use, so that the servers do not load the front end."""
    modules = {"P": "parrot.frontend.pfunc", "errors": "parrot.protocol.errors"}
    if name not in modules:
        raise AttributeError(f"module 'parrot' has no attribute {name!r}")
    return import_module(modules[name])
