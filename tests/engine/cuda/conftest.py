"""Run the kernels in Triton's interpreter where there is no CUDA device, as
tests/engine/kernels does; the variable must be set before they are first imported."""

import importlib.util
import os

import torch

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
