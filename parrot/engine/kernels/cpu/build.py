"""Compile the kernels of a CPU to an object file: a process of its own, since the compiler would
keep others of its process from running for seconds.

    python -m parrot.engine.kernels.cpu.build DTYPE > FILE
"""
# mypy: disable-error-code="no-untyped-call"

import os
import sys

import llvmlite.binding as llvm
from numba import types

from parrot.engine.kernels.cpu.step_kernels import kernels_of

_NICENESS = 19  # who serves meanwhile goes first

# What numba makes has a place for a result and one for an error first, and returns a status.
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
    """An object file for this CPU with the kernels by their names."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly("")
    for name, kernel in kernels_of(dtype).items():
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


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    sys.stdout.buffer.write(compile_kernels(sys.argv[1]))
