"""Removes repeated work from Triton's interpreter.

Each launch and each function call in a kernel patches all members of `triton.language`. Integer
operations check for overflows, and nothing uses the result. Each value gets a new shape, which is
checked and formatted. Each operation derives the common type of its operands. Together this is most
of the time of small kernels."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.support.quick_operators import quick_members

core = interpreter.tl.core


def install() -> None:
    """Replace these parts of the interpreter. Later calls have no effect."""
    if interpreter._patch_builtin.__module__ == __name__:
        return
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    _install_quick_calls()
    _install_quick_types()
    _install_quick_values()
    _install_quick_operands()
    _install_rounding()


def _install_quick_calls() -> None:
    builtins: dict[Any, list[tuple[str, Any]]] = {}  # The original members, by module or class.
    patch_language = interpreter._patch_lang

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in builtins:
            quick = quick_members(package)
            builtins[package] = [
                (name, quick.get(name, _unchanged)(_interpreted(member)))
                for name, member in inspect.getmembers(package)
                if core.is_builtin(member)
            ]
        for name, member in builtins[package]:
            scope.set_attr(package, name, member)

    @cache
    def patch_once(function: Any) -> Any:
        scope = patch_language(function)
        # Everything in a process with the interpreter is interpreted, so changes need no undo.
        scope._changes.clear()
        return scope

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch_once(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    inspected = dict(vars(inspect), getfullargspec=cache(inspect.getfullargspec))
    interpreter.inspect = SimpleNamespace(**inspected)
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_once
    interpreter.InterpretedFunction.__call__ = call


def _install_rounding() -> None:
    """Round e4m3 to nearest, as a GPU does. The interpreter rounds small numbers to zero."""
    convert, tl = interpreter._convert_float, interpreter.tl

    def rounded(data: Any, kind: Any, target: Any, mode: Any) -> Any:
        if (kind, target) != (tl.float32, tl.float8e4nv):
            return convert(data, kind, target, mode)
        numbers = torch.from_numpy(np.ascontiguousarray(data))
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = rounded


def _unchanged(member: Any) -> Any:
    return member


def _interpreted(member: Any) -> Callable[..., Any]:
    """A function of the language with the semantics of the interpreter."""
    function = getattr(member, "__wrapped__", member)
    semantic = interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call


def _install_quick_types() -> None:
    """Let values of the same shape share the shape object."""
    blocks: dict[tuple[int, ...], tuple[Any, int, str, Any]] = {}
    numpy_types: dict[str, Any] = {}
    constexpr, block_type = core.constexpr, core.block_type
    holders = (list, tuple, core.tuple, constexpr)
    make_block, numpy_type_of = block_type.__init__, interpreter._get_np_dtype
    unwrap = core._unwrap_if_constexpr
    of_scalar = core.tuple([]), constexpr(1)

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([s.value if type(s) is constexpr else s for s in shape])
        if (known := blocks.get(sizes)) is None:
            make_block(self, element_ty, shape)
            of_tensors = core.tuple([constexpr(s) for s in sizes]), constexpr(self.numel)
            known = blocks[sizes] = self.shape, self.numel, str(self.shape), of_tensors
        self.element_ty, self.sizes = element_ty, sizes
        self.shape, self.numel, words, self.of_tensors = known
        self.name = f"<{words}, {element_ty.name}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - so it is named
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else of_scalar

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

    block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor
    core._unwrap_if_constexpr = quick_unwrap
    interpreter._get_np_dtype = quick_numpy_type


def _install_quick_values() -> None:
    """Check arrays by the size of their elements, and share the mask of loads without a mask."""
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    sizes: dict[str, int] = {}  # The largest element of each type, in bytes.
    whole: dict[tuple[int, ...], Any] = {}

    def largest(kind: Any) -> int:
        if (size := sizes.get(kind.name)) is None:
            bits = 64 if kind.is_ptr() else kind.primitive_bitwidth
            size = sizes[kind.name] = max(1, bits // 8)
        return size

    def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        if data.itemsize > largest(dtype):
            raise ValueError(f"elements of {data.itemsize} bytes do not fit in {dtype}")
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        output, kind = op(lhs.data, rhs.data), lhs.dtype.scalar
        if output.itemsize > largest(kind):
            output = output.astype(interpreter._get_np_dtype(kind))
        return handle(output, kind)

    def create_load(self: Any, ptr: Any, *options: Any) -> Any:
        shape = ptr.data.shape
        if (mask := whole.get(shape)) is None:
            ones = np.ones(shape, dtype=bool)
            ones.setflags(write=False)
            mask = whole[shape] = handle(ones, interpreter.tl.int1)
        return self.create_masked_load(ptr, mask, None, *options)

    handle.__init__ = init_handle
    builder.binary_op = binary_op
    builder.create_load = create_load


def _install_quick_operands() -> None:
    """Cache the common type of each pair of types, or of a type and a number, and the common shape
    of each pair of shapes."""
    conversions: dict[tuple[Any, ...], list[Any]] = {}
    shapes: dict[tuple[Any, Any], Any] = {}
    check = TritonSemantic.binary_op_type_checking_impl
    broadcast = TritonSemantic.broadcast_impl_value

    def quick_check(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        options = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        key = _kind_of(lhs), _kind_of(rhs), options
        if (known := conversions.get(key)) is None:
            before = _scalar_of(lhs), _scalar_of(rhs)
            after = check(self, *before, *options)
            known = conversions[key] = list(map(_conversion, before, after))
        return self.broadcast_impl_value(
            _converted(self, lhs, known[0]), _converted(self, rhs, known[1])
        )

    def quick_broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if not left.is_block():
            return (_spread(lhs, right.shape), rhs) if right.is_block() else (lhs, rhs)
        if not right.is_block():
            return lhs, _spread(rhs, left.shape)
        if left.shape is right.shape:
            return lhs, rhs
        key = left.sizes, right.sizes
        if key not in shapes:
            shapes[key] = broadcast(self, lhs, rhs)[0].type.shape
        return _spread(lhs, shapes[key]), _spread(rhs, shapes[key])

    TritonSemantic.binary_op_type_checking_impl = quick_check
    TritonSemantic.broadcast_impl_value = quick_broadcast


def _kind_of(operand: Any) -> Any:
    return operand.dtype.name if type(operand) is core.tensor else (type(operand), operand)


def _scalar_of(operand: Any) -> Any:
    if type(operand) is not core.tensor:
        return operand
    first = interpreter.TensorHandle(operand.handle.data.ravel()[:1], operand.dtype)
    return core.tensor(first, operand.dtype)


def _conversion(before: Any, after: Any) -> Any:
    """How an operand was converted: None if it was not, the new type of a value, or the tensor that
    replaces a number."""
    if type(before) is not core.tensor:
        after.handle.data.setflags(write=False)
        return after
    return None if before.dtype == after.dtype else after.dtype


def _converted(semantic: Any, operand: Any, known: Any) -> Any:
    if known is None:
        return operand
    return known if type(known) is core.tensor else semantic.cast(operand, known)


def _spread(value: Any, shape: Any) -> Any:
    if value.type.is_block() and value.type.shape is shape:
        return value
    data = np.empty(shape.values, interpreter._get_np_dtype(value.dtype))
    data[...] = value.handle.data
    handle = interpreter.TensorHandle(data, value.dtype)
    return core.tensor(handle, core.block_type(value.dtype, shape))
