"""Compiles the CPU kernels to an object file. Runs as a process of its own.

    python -m parrot.engine.cpu.build DTYPE FILE

writes the file if it does not exist, and its content to standard output. The compiler holds the GIL
for seconds, so it must not run in an engine's process. If the engine exits, the process continues.
A lock makes engines that start at the same time compile only once.
"""
# mypy: disable-error-code="no-untyped-call"

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import llvmlite.binding as llvm
from numba import types

from parrot.engine.cpu.native import keep, kept, sealed
from parrot.engine.cpu.prompt_kernels import KERNELS
from parrot.engine.cpu.row_kernels import row_kernels_of
from parrot.engine.cpu.step_kernels import kernels_of

_NICENESS = 19  # Lowest priority: engines that serve requests run first.

# A function that calls numba's compiled function. That function has two more parameters, for a
# result and an error, and returns a status.
_ENTRY = """
declare i32 @"{inner}"(ptr, ptr, {types})
define void @{name}({arguments}) {{
  %result = alloca ptr
  %error = alloca ptr
  %status = call i32 @"{inner}"(ptr %result, ptr %error, {arguments})
  ret void
}}
"""


def compile_kernels(dtype: str) -> bytes:
    """An object file for this CPU, with a function per kernel."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    module = llvm.parse_assembly("")
    kernels = kernels_of(dtype) | row_kernels_of(dtype)
    if dtype == "bfloat16" and llvm.get_host_cpu_features().get("avx512bf16"):
        kernels |= KERNELS
    for name, kernel in kernels.items():
        count = kernel.py_func.__code__.co_argcount
        signature = (types.int64,) * count
        kernel.compile(signature)
        entry = _ENTRY.format(
            name=name,
            inner=kernel.overloads[signature].fndesc.llvm_func_name,
            types=", ".join(["i64"] * count),
            arguments=", ".join(f"i64 %x{i}" for i in range(count)),
        )
        for text in (kernel.inspect_llvm(signature), entry):
            module.link_in(llvm.parse_assembly(text))
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
    )
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    return bytes(machine.emit_object(module))


@contextmanager
def _build_lock(path: Path) -> Iterator[None]:
    """Context with a lock for `path` between processes, if the system supports locks."""
    try:
        import fcntl

        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("w")
    except (ImportError, OSError):
        yield
        return
    with file:
        with suppress(OSError):  # Some network file systems do not support locks.
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    dtype, path = sys.argv[1], Path(sys.argv[2])
    with _build_lock(path):
        code = kept(path)
        if code is None:
            code = compile_kernels(dtype)
            keep(path, code)
    sys.stdout.buffer.write(sealed(code))
