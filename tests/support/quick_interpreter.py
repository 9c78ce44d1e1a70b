"""Triton's interpreter without work that it repeats.

A call of a function in a kernel makes `triton.language` interpreted, although the kernel's launch
has done so; and each time all its members are looked through. Overflows of integers are looked for,
which nobody is told of. The shape of each value is made anew, checked and put into words. Together
that is two thirds of the time of small kernels."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

core = interpreter.tl.core


def install() -> None:
    """Replace what does that; once in a process."""
    if interpreter._patch_builtin.__module__ == __name__:
        return
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    _install_quick_calls()
    _install_quick_types()
    _install_rounding()


def _install_quick_calls() -> None:
    builtins: dict[Any, list[tuple[str, Any]]] = {}  # by module or class, as they were at first
    languages: dict[Any, list[Any]] = {}  # those that a function's module has imported

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in builtins:
            members = inspect.getmembers(package)
            builtins[package] = [
                (name, _interpreted(member)) for name, member in members if core.is_builtin(member)
            ]
        for name, member in builtins[package]:
            scope.set_attr(package, name, member)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = languages.get(self.fn)
        if found is None:
            values = self.fn.__globals__.values()
            found = languages[self.fn] = [m for m in values if m is interpreter.tl or m is core]
        if any(core.is_builtin(language.load) for language in found):
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_builtin = patch_builtin
    interpreter.InterpretedFunction.__call__ = call


def _install_rounding() -> None:
    """e4m3 is rounded to nearest, as on a GPU. The interpreter rounds small numbers to zero."""
    convert, tl = interpreter._convert_float, interpreter.tl

    def rounded(data: Any, kind: Any, target: Any, mode: Any) -> Any:
        if (kind, target) != (tl.float32, tl.float8e4nv):
            return convert(data, kind, target, mode)
        numbers = torch.from_numpy(np.ascontiguousarray(data))
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = rounded


def _interpreted(member: Any) -> Callable[..., Any]:
    """A function of the language with the semantics of the interpreter."""
    function = getattr(member, "__wrapped__", member)
    semantic = interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call


def _install_quick_types() -> None:
    """Values of the same shape share it, and are then known to need no broadcast."""
    blocks: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    numpy_types: dict[str, Any] = {}
    constexpr, block_type = core.constexpr, core.block_type
    holders = (list, tuple, core.tuple, constexpr)
    make_block, numpy_type_of = block_type.__init__, interpreter._get_np_dtype
    unwrap, broadcast = core._unwrap_if_constexpr, TritonSemantic.broadcast_impl_value

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([s.value if type(s) is constexpr else s for s in shape])
        if (known := blocks.get(sizes)) is None:
            make_block(self, element_ty, shape)
            blocks[sizes] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, words = known
        self.name = f"<{words}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - so it is named
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if (known := shapes.get(sizes)) is None:
            numel = type.numel if sizes else 1
            known = shapes[sizes] = core.tuple([constexpr(s) for s in sizes]), constexpr(numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    def quick_unwrap(value: Any) -> Any:
        if type(value) is constexpr:
            return value.value
        return unwrap(value) if isinstance(value, holders) else value

    def quick_numpy_type(kind: Any) -> Any:
        scalar = kind.scalar
        if scalar.is_ptr():
            return numpy_type_of(scalar)
        if (known := numpy_types.get(scalar.name)) is None:
            known = numpy_types[scalar.name] = numpy_type_of(scalar)
        return known

    def quick_broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor
    core._unwrap_if_constexpr = quick_unwrap
    interpreter._get_np_dtype = quick_numpy_type
    TritonSemantic.broadcast_impl_value = quick_broadcast
