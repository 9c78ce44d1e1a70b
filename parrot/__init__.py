"""Parrot serves LLM applications. Programs begin with `from parrot import P`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parrot.frontend import pfunc as P
    from parrot.protocol import errors

__all__ = ["P", "errors"]


def __getattr__(name: str) -> Any:
    """Imported on first use, so that the servers do not load the front end."""
    import importlib

    modules = {"P": "parrot.frontend.pfunc", "errors": "parrot.protocol.errors"}
    if name not in modules:
        raise AttributeError(f"module 'parrot' has no attribute {name!r}")
    return importlib.import_module(modules[name])
