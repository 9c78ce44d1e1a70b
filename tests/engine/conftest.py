"""Settings for kernel tests. `parrot.engine` must be imported before torch, because it sets how
torch's threads wait.

Without a CUDA device, the kernels run in Triton's interpreter. `triton.jit` reads TRITON_INTERPRET
when it decorates a kernel, and parts of Triton that load later read it again. So the variable is
set before the first import of a kernel, and it stays set. Tests that must compile a kernel do so in
a process without the variable. With a CUDA device, the interpreter tests are skipped and tests/gpu
runs the same cases."""

import importlib.util
import os
import sys

import pytest

import parrot.engine  # noqa: F401

import torch  # isort: skip

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    early = [
        name
        for name, module in sys.modules.items()
        if name.startswith("parrot.engine.kernels.") and hasattr(module, "triton")
    ]
    if early and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError(f"a test outside tests/engine imports {early[0]}")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def quick_kernels() -> None:
    """Speed up the interpreter. By now, the tests of kernels have imported the kernels and
    Triton."""
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        from tests.support import quick_interpreter

        quick_interpreter.install()
