"""Triton's interpreter without work that it repeats.

A call of a function in a kernel makes `triton.language` interpreted, although the kernel's launch
has done so; and each time all its members are looked through. Overflows of integers are looked for,
which nobody is told of. Together that is more than half of the time of small kernels."""

import inspect
from dataclasses import replace
from typing import Any

from triton.runtime import interpreter


def install() -> None:
    """Replace what does that."""
    builtins: dict[Any, list[tuple[str, Any]]] = {}  # by module or class, as they were at first
    core = interpreter.tl.core

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in builtins:
            members = inspect.getmembers(package)
            builtins[package] = [(n, member) for n, member in members if core.is_builtin(member)]
        for name, member in builtins[package]:
            interpreter._patch_attr(package, name, member, builder, scope)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        languages = [m for m in self.fn.__globals__.values() if m is interpreter.tl or m is core]
        if any(core.is_builtin(language.load) for language in languages):
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_builtin = patch_builtin
    interpreter.InterpretedFunction.__call__ = call
