"""Faster operators, loads and stores for Triton's interpreter.

A sum in a kernel passes through eight functions of Triton, which derive the same types each time.
Here, the types of the operands select the NumPy operation and the type of the result. The first
operation of each kind also runs Triton's code. The fast path is used only if it gives the same
bytes. Operations on types that NumPy does not have always run Triton's code."""

from collections.abc import Callable
from typing import Any

import numpy as np
from triton.runtime import interpreter

core = interpreter.tl.core
_new_tensor, _new_handle = core.tensor.__new__, interpreter.TensorHandle.__new__
_load, _store = interpreter._interpreter.load, interpreter._interpreter.store

_OPERATIONS = {
    **dict.fromkeys(("add", "radd"), np.add),
    **dict.fromkeys(("mul", "rmul"), np.multiply),
    **dict.fromkeys(("and", "rand"), np.bitwise_and),
    **dict.fromkeys(("or", "ror"), np.bitwise_or),
    "sub": np.subtract,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_BITWISE = np.bitwise_and, np.bitwise_or
# NumPy computes with these types like a GPU. It has no bfloat16 and no e4m3.
_PLAIN = frozenset(map(np.dtype, ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8")))
_PLAIN_NAMES = frozenset(
    [*(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "fp32", "fp64"]
)
_BOOL = np.dtype(bool)
_SHORT, _LONG = True, False


def quick_members(package: Any) -> dict[str, Callable[[Any], Any]]:
    """For each member of `core.tensor` or of a language, the function that makes a fast version."""
    if package is core.tensor:
        operators = {
            f"__{name}__": (lambda slow, operation=operation: _operator(slow, operation))
            for name, operation in _OPERATIONS.items()
        }
        return operators | {"__getitem__": _quick_getitem, "to": _quick_cast}
    if package in (core, interpreter.tl):
        return {"load": _quick_load, "store": _quick_store}
    return {}


class _Result:
    """The type of a result, with values that depend on the type."""

    __slots__ = ("dtype", "kind", "numel", "shape", "type")

    def __init__(self, example: Any) -> None:
        self.type, self.dtype = example.type, example.dtype
        self.shape, self.numel = example.shape, example.numel
        self.kind = example.handle.dtype

    def of(self, data: Any) -> Any:
        handle = _new_handle(interpreter.TensorHandle)
        handle.data, handle.dtype, handle.attr = data, self.kind, {}
        result = _new_tensor(core.tensor)
        result.handle, result.type, result.dtype = handle, self.type, self.dtype
        result.shape, result.numel = self.shape, self.numel
        return result


def _operator(slow: Callable[[Any, Any], Any], operation: Any) -> Callable[[Any, Any], Any]:
    known: dict[tuple[Any, ...], Any] = {}

    def call(self: Any, other: Any) -> Any:
        if type(other) is core.constexpr:
            other = other.value
        if type(other) is core.tensor:
            key: tuple[Any, ...] = self.type.name, other.type.name
        else:
            key = self.type.name, type(other), other
        short = known.get(key)
        if short is None:
            result = slow(self, other)
            known[key] = _short_form(operation, self, other, result) or _LONG
            return result
        if short is _LONG:
            return slow(self, other)
        compute, dtype, constant, other_dtype, result = short
        left = self.handle.data
        right = other.handle.data if constant is None else constant
        if left.dtype is not dtype or right.dtype is not other_dtype:
            return slow(self, other)
        return result.of(compute(left, right))

    return call


def _short_form(operation: Any, left: Any, right: Any, result: Any) -> tuple[Any, ...] | None:
    constant = None
    common = interpreter._get_np_dtype(result.handle.dtype)
    if type(right) is not core.tensor:
        # 0.0 == -0.0, so the bytes may differ.
        if not isinstance(right, int | float) or right == 0:
            return None
        constant = np.array([right], np.int64 if left.dtype.is_ptr() else common)
    own = left.handle.data
    other = right.handle.data if constant is None else constant
    compute = operation
    if left.dtype.is_ptr():
        if operation is not np.add or other.dtype.kind not in "iu":
            return None
        width = np.uint64(max(1, left.dtype.element_ty.primitive_bitwidth // 8))
        if constant is None:
            compute = lambda a, b: a + b.astype(np.uint64) * width  # noqa: E731
        else:
            constant = other = constant.astype(np.uint64) * width
    elif own.dtype == other.dtype == common == _BOOL:
        if operation not in _BITWISE:
            return None
    else:
        names = {left.dtype.name} | ({right.dtype.name} if constant is None else set())
        if not names <= _PLAIN_NAMES or not {own.dtype, other.dtype, common} <= _PLAIN:
            return None
        if np.result_type(own, other) != common:
            compute = lambda a, b: operation(a.astype(common), b.astype(common))  # noqa: E731
    if not _same(compute(own, other), result.handle.data):
        return None
    return compute, own.dtype, constant, other.dtype, _Result(result)


def _same(left: Any, right: Any) -> bool:
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


def _quick_getitem(slow: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    known: dict[Any, _Result] = {}
    whole = slice(None)

    def call(self: Any, slices: Any) -> Any:
        if type(slices) is not tuple or any(s is not None and s != whole for s in slices):
            return slow(self, slices)
        key = self.type.name, tuple([s is None for s in slices])
        if (result := known.get(key)) is None:
            example = slow(self, slices)
            known[key] = _Result(example)
            assert _same(self.handle.data[slices], example.handle.data)
            return example
        return result.of(self.handle.data[slices])

    return call


def _quick_cast(slow: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[str, str], Any] = {}

    def call(self: Any, dtype: Any, *options: Any, **more: Any) -> Any:
        if options or more:
            return slow(self, dtype, *options, **more)
        wanted = dtype.value if type(dtype) is core.constexpr else dtype
        key = self.type.name, wanted.name
        short = known.get(key)
        if short is None:
            result = slow(self, dtype)
            data = result.handle.data
            if result is self:
                known[key] = _SHORT
            elif {self.dtype.name, wanted.name} <= _PLAIN_NAMES:
                assert _same(self.handle.data.astype(data.dtype), data)
                known[key] = data.dtype, _Result(result)
            else:
                known[key] = _LONG
            return result
        if short is _SHORT:
            return self
        if short is _LONG:
            return slow(self, dtype)
        target, result = short
        return result.of(self.handle.data.astype(target))

    return call


def _quick_load(slow: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[Any, ...], Any] = {}
    numbers: dict[Any, Any] = {}  # The values of masked elements.

    def filled(number: Any, shape: Any, dtype: Any) -> Any:
        key = number, shape, dtype
        if (values := numbers.get(key)) is None:
            values = numbers[key] = np.full(shape, number, dtype)
            values.setflags(write=False)
        return values

    def call(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
        kind = mask.type.name if type(mask) is core.tensor else mask
        key = pointer.type.name, kind, type(other)
        short = known.get(key)
        if short is None:
            result = slow(pointer, mask, other, **options)
            is_short = (
                pointer.dtype.is_ptr()
                and result.dtype is pointer.dtype.element_ty
                and (mask is None or (type(mask) is core.tensor and mask.dtype is core.int1))
                and (other is None or type(other) in (int, float))
                and result.dtype.name in _PLAIN_NAMES | ({"fp16", "bf16"} if not other else set())
            )
            dtype = interpreter._get_np_dtype(result.dtype)
            known[key] = (dtype, _Result(result)) if is_short else _LONG
            return result
        if short is _LONG or not options.keys() <= _IRRELEVANT:
            return slow(pointer, mask, other, **options)
        dtype, found = short
        addresses = pointer.handle.data
        shape = addresses.shape
        where = filled(True, shape, _BOOL) if mask is None else _spread(mask.handle.data, shape)
        return found.of(_load(addresses, where, filled(other or 0, shape, dtype), dtype))

    return call


_IRRELEVANT = {"cache_modifier", "eviction_policy", "volatile"}


def _quick_store(slow: Callable[..., Any]) -> Callable[..., Any]:
    def call(pointer: Any, value: Any, mask: Any = None, **options: Any) -> Any:
        if (
            type(value) is not core.tensor
            or type(mask) is not core.tensor
            or not options.keys() <= _IRRELEVANT
            or not pointer.dtype.is_ptr()
            or pointer.dtype.element_ty is not value.dtype
            or value.dtype is core.int1
            or mask.dtype is not core.int1
        ):
            return slow(pointer, value, mask, **options)
        addresses, values, where = pointer.handle.data, value.handle.data, mask.handle.data
        if addresses.shape != values.shape:
            return slow(pointer, value, mask, **options)
        _store(addresses, values, _spread(where, addresses.shape))
        return None

    return call


def _spread(mask: Any, shape: Any) -> Any:
    if mask.shape == shape:
        return mask
    whole = np.empty(shape, mask.dtype)
    whole[...] = mask
    return whole
