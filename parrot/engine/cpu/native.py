"""The compiled kernels of a CPU: from the user's cache, or else from a process that compiles them.

That takes some seconds of a core, once for each version and CPU. Machine code is loaded with
llvmlite alone, since importing numba would hold up steps for a quarter of a second."""

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
_COMPILE_LIMIT_S = 600.0
_DIGEST_BYTES = 32

Kernel = Callable[[int, int, int], None]
"""(x, step, layer): addresses, see `layout`."""

PromptKernel = Callable[[int], None]
"""(task): the address of a block, see `prompt_layout`."""

RowKernel = Callable[[int, int], None]
"""(task, threads): the address of a block, see `row_layout`."""


@dataclass(frozen=True, slots=True)
class RowKernels:
    """See `row_layout`."""

    norm_rows: RowKernel
    gate_rows: RowKernel
    turn_rows: RowKernel


@dataclass(frozen=True, slots=True)
class Kernels:
    """`parallel` and `attend_part` are addresses for `layout.PARALLEL` and `ATTEND_PART`;
    `parallel` is 0 where torch's threads cannot be used. `attend_prompt` None: the CPU or the type
    has none."""

    dtype: str
    add_rms_norm: Kernel
    silu_multiply: Kernel
    attend: Kernel
    attend_part: int
    parallel: int
    attend_prompt: PromptKernel | None
    rows: RowKernels
    code: object
    """Owns the machine code."""


def start_loading(dtype: str) -> "Future[Kernels] | None":
    """Load the kernels in the background. None: there are none for this type, or no compiler."""
    if dtype not in DTYPES or not all(find_spec(module) for module in ("numba", "llvmlite")):
        return None
    future: Future[Kernels] = Future()

    def run() -> None:
        try:
            future.set_result(load(dtype))
        except Exception as error:  # noqa: BLE001 - steps go on without
            logger.warning("steps run without compiled kernels, more slowly: %s", error)
            future.set_exception(error)

    threading.Thread(target=run, name="cpu-kernels", daemon=True).start()
    return future


def load(dtype: str) -> Kernels:
    """The kernels for a type; raises `OSError`, `RuntimeError` or `subprocess.SubprocessError` if
    they cannot be had."""
    import llvmlite.binding as llvm

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parrot" / "kernels"
    path = folder / f"{_key(dtype, llvm.get_host_cpu_name(), llvm.get_host_cpu_features())}.o"
    code = kept(path)
    return _link(dtype, _compile(dtype, path) if code is None else code)


def _key(dtype: str, cpu: str, features: dict[str, bool]) -> str:
    """Names what the machine code depends on."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    versions = [version("numba"), version("llvmlite"), sys.version]
    digest.update(repr((dtype, cpu, sorted(features.items()), versions)).encode())
    return digest.hexdigest()[:32]


def kept(path: Path) -> bytes | None:
    """The code that was kept there, if it is whole and nobody else could have written it."""
    try:
        with path.open("rb") as file:
            status, content = os.fstat(file.fileno()), file.read()
    except OSError:
        return None
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        return None
    return unsealed(content)


def sealed(code: bytes) -> bytes:
    """The code behind its digest: what is not whole would end the process that links it."""
    return hashlib.sha256(code).digest() + code


def unsealed(content: bytes) -> bytes | None:
    """The code, if it is as it was."""
    code = content[_DIGEST_BYTES:]
    return code if sealed(code) == content else None


def keep(path: Path, code: bytes) -> None:
    """Keep machine code for the next process, if the folder can be written."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.touch(mode=0o600)
        temporary.write_bytes(sealed(code))
        temporary.replace(path)
    except OSError as error:
        logger.info("compiled kernels are not kept: %s", error)


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
    # Those that take microseconds keep Python's lock: to get it again could take milliseconds.
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
            *(_row_kernel(engine, name) for name in ("norm_rows", "gate_rows", "turn_rows"))
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
    """How torch runs a function in its threads, if it does so with GNU's OpenMP; else 0. Threads of
    our own would take turns with those on the same cores."""
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
