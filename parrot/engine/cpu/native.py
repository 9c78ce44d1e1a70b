"""Loads the compiled CPU kernels from the user's cache, or from a process that compiles them.

Compiling takes a core several seconds, once per version and CPU. The machine code is loaded with
llvmlite only, because importing numba would delay steps by 0.25 s."""

import ctypes
import hashlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

DTYPES = ("bfloat16", "float32")

_SOURCES = (
    *("build.py", "layout.py", "simd.py", "step_kernels.py"),
    *("prompt_kernels.py", "prompt_layout.py", "row_kernels.py", "row_layout.py", "tiles.py"),
)
_COMPILE_LIMIT_S = 600.0  # Longest time of the compilation, in seconds.
_DIGEST_BYTES = 32  # Size of the digest before the code in a cache file.

Kernel = Callable[[int, int, int], None]
"""(x, step, layer): the addresses of `layout`."""

PromptKernel = Callable[[int], None]
"""(task): the address of a block of `prompt_layout`."""

RowKernel = Callable[[int, int], None]
"""(task, threads): the address of a block of `row_layout`, and the number of threads."""


@dataclass(frozen=True, slots=True)
class RowKernels:
    """The kernels of `row_layout`."""

    norm_rows: RowKernel
    gate_rows: RowKernel
    rotate_rows: RowKernel


@dataclass(frozen=True, slots=True)
class Kernels:
    """All loaded kernels for one type."""

    dtype: str
    add_rms_norm: Kernel
    silu_multiply: Kernel
    attend: Kernel
    attend_part: int  # Address for `layout.ATTEND_PART`.
    parallel: int  # Address for `layout.PARALLEL`; 0 if torch's threads cannot be used.
    attend_prompt: PromptKernel | None  # None if the CPU or the type does not support it.
    rows: RowKernels
    code: object  # Owns the machine code.


def start_loading(dtype: str) -> "Future[Kernels] | None":
    """Load the kernels in the background. None for unsupported types or without a compiler."""
    if dtype not in DTYPES or not all(find_spec(module) for module in ("numba", "llvmlite")):
        return None
    future: Future[Kernels] = Future()

    def run() -> None:
        try:
            future.set_result(load(dtype))
        except Exception as error:  # noqa: BLE001 - steps run without the kernels
            logger.warning("steps run without compiled kernels, more slowly: %s", error)
            future.set_exception(error)

    threading.Thread(target=run, name="cpu-kernels", daemon=True).start()
    return future


def load(dtype: str) -> Kernels:
    """Load the kernels for a type.

    Raises `OSError`, `RuntimeError` or `subprocess.SubprocessError` if they cannot be compiled."""
    import llvmlite.binding as llvm

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parrot" / "kernels"
    path = folder / f"{_key(dtype, llvm.get_host_cpu_name(), llvm.get_host_cpu_features())}.o"
    code = kept(path)
    return _link(dtype, _compile(dtype, path) if code is None else code)


def _key(dtype: str, cpu: str, features: dict[str, bool]) -> str:
    """The name of the cache file: a hash of all inputs of the compilation."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    versions = [version("numba"), version("llvmlite"), sys.version]
    digest.update(repr((dtype, cpu, sorted(features.items()), versions)).encode())
    return digest.hexdigest()[:32]


def kept(path: Path) -> bytes | None:
    """The machine code of a cache file; None if it is incomplete or another user could write it."""
    try:
        with path.open("rb") as file:
            status, content = os.fstat(file.fileno()), file.read()
    except OSError:
        return None
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        return None
    return unsealed(content)


def sealed(code: bytes) -> bytes:
    """The code with its digest in front. Linking an incomplete file would crash the process."""
    return hashlib.sha256(code).digest() + code


def unsealed(content: bytes) -> bytes | None:
    """The code of a `sealed` content; None if the digest does not match."""
    code = content[_DIGEST_BYTES:]
    return code if sealed(code) == content else None


def keep(path: Path, code: bytes) -> None:
    """Write the machine code to the cache, if the folder is writable."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.touch(mode=0o600)
        temporary.write_bytes(sealed(code))
        temporary.replace(path)
    except OSError as error:
        logger.info("compiled kernels cannot be cached: %s", error)


def _compile(dtype: str, path: Path) -> bytes:
    command = [sys.executable, "-m", "parrot.engine.cpu.build", dtype, str(path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        command, env=environment, capture_output=True, timeout=_COMPILE_LIMIT_S, check=False
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"compiling them failed: {lines[-1] if lines else done.returncode}")
    if (code := unsealed(done.stdout)) is None:
        raise RuntimeError("compiling them failed: something else wrote to the compiler's output")
    return code


def _link(dtype: str, code: bytes) -> Kernels:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    # Kernels that take microseconds keep the GIL, because acquiring it again can take milliseconds.
    quick = ctypes.PYFUNCTYPE(None, *[ctypes.c_int64] * 3)
    long = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)
    return Kernels(
        dtype=dtype,
        add_rms_norm=quick(engine.get_function_address("add_rms_norm")),
        silu_multiply=quick(engine.get_function_address("silu_multiply")),
        attend=long(engine.get_function_address("attend")),
        attend_part=engine.get_function_address("attend_part"),
        parallel=_parallel(),
        attend_prompt=_prompt_kernel(engine),
        rows=RowKernels(
            *(_row_kernel(engine, name) for name in ("norm_rows", "gate_rows", "rotate_rows"))
        ),
        code=engine,
    )


def _prompt_kernel(engine: Any) -> PromptKernel | None:
    kernel, part = map(engine.get_function_address, ("attend_prompt", "attend_prompt_part"))
    if not kernel:
        return None
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2)(kernel)
    return lambda task: function(task, part)


def _row_kernel(engine: Any, name: str) -> RowKernel:
    address, parallel = engine.get_function_address(name), _parallel()
    alone = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)
    kinds = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint, ctypes.c_uint)
    in_threads = ctypes.CFUNCTYPE(None, *kinds)(parallel) if parallel else None

    def run(task: int, threads: int) -> None:
        if in_threads is None or threads == 1:
            alone(task)
        else:
            in_threads(address, task, threads, 0)

    return run


def _parallel() -> int:
    """The address of GOMP_parallel, if torch uses GNU's OpenMP; else 0."""
    # Other threads would compete with torch's threads for the same cores.
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
