"""After the loss of the device, every call reports the loss, so that the process exits instead of
failing all jobs."""

import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

SIZES = {"hidden_size": 64, "num_attention_heads": 4}

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

# The script runs in its own process, because the device is unusable in it afterwards.
SCRIPT = """
import sys, torch
from contextlib import suppress
from parrot.engine.runner.cuda import CudaOptions, CudaRunner
from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.models.checkpoint import load_decoder
from parrot.engine.core.steps import DeviceLost, SampleSpec, SequenceStep, StepPlan
from parrot.protocol.sampling import ResolvedSampling

model = load_decoder(open_checkpoint(sys.argv[1]), torch.float32, torch.device("cuda"))
runner = CudaRunner(model, 64, 64, CudaOptions(max_rows=4))
runner.warm_up()

def plan(start):
    spec = SampleSpec(1, ResolvedSampling(temperature=0), 0, start + 1)
    return StepPlan((SequenceStep(1, [1], start, [0], spec),))

runner.run(plan(0))
launched = runner.launch(plan(1), None)
with torch.inference_mode(), suppress(RuntimeError):
    torch.zeros(4, device="cuda")[torch.tensor([99], device="cuda")].add_(1)  # an assertion fails
lost = 0
for step in (launched.wait, lambda: runner.run(plan(2)), lambda: runner.run(plan(2))):
    try:
        step()
    except DeviceLost:
        lost += 1
print("lost", lost, flush=True)
"""


def test_every_call_reports_that_the_device_is_lost(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    from tests.support.tiny_model import make_tiny_model

    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), overrides=SIZES)
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    # The step that was launched first may have finished before the assertion failed.
    assert done.stdout.startswith(("lost 2", "lost 3")), done.stdout + done.stderr[:2000]
