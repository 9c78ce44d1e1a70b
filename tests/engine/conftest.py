"""Torch must not be loaded before `parrot.engine` has settled how its threads wait.

Where there is no CUDA device, the kernels run in Triton's interpreter. `triton.jit` decides when it
decorates, and parts of Triton that load later look again, so the variable is set before the kernels
are first imported and stays. Nothing else on such a machine runs a kernel; a test that must compile
one does so in a process without the variable. On a machine with a device these tests skip, and
tests/gpu runs the same cases."""

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
        raise pytest.UsageError(f"a test outside of tests/engine imports {early[0]}")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def quick_kernels() -> None:
    """Tests of kernels have imported them by now, and Triton with them."""
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        from tests.support import quick_interpreter

        quick_interpreter.install()
