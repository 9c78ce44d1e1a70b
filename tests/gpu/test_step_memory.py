"""On a GPU with 24 GiB, the default KV pool leaves enough memory for steps.

The test limits PyTorch's allocator to 23 GiB, since CUDA itself takes about 1 GiB."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.models.shapes import KNOWN_SHAPES
from parrot.engine.runner.load import load_runner
from parrot.protocol.sampling import ResolvedSampling
from tests.support.runner_driver import Driver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TOTAL, OF_CUDA = 24 << 30, 1 << 30
FOUR_BITS = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.cuda.empty_cache()
    before, (_, real) = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()

    def memory(*_: object) -> tuple[int, int]:
        return TOTAL - OF_CUDA - (torch.cuda.memory_reserved() - before), TOTAL

    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    torch.cuda.set_per_process_memory_fraction((before + TOTAL - OF_CUDA) / real)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("small_gpu")
@pytest.mark.parametrize(("four_bits", "num_tokens"), [(False, 2048), (True, 8192)])
def test_the_largest_steps_run(tmp_path: Path, four_bits: bool, num_tokens: int) -> None:
    config: dict[str, Any] = KNOWN_SHAPES["llama-3.1-8b"]
    if four_bits:
        config = config | {"quantization_config": FOUR_BITS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_runner(
        BuiltinConfig.model_validate(
            {
                "model": str(tmp_path),
                "device": "cuda",
                "dtype": "auto" if four_bits else "bfloat16",
                "scheduler": {"max_num_batched_tokens": num_tokens},
                "instance": {"load_format": "dummy", "max_seq_len": 32768},
            }
        )
    )
    driver = Driver(loaded.runner)
    driver.generate([driver.context(range(2 * num_tokens))], 2, num_tokens)
    many = [driver.context(range(i, i + 16)) for i in range(256)]
    driver.generate(many, 4, num_tokens // 256)
    for context in many:
        context.tokens.append(7)
    driver.step([(context, 1) for context in many], ResolvedSampling(top_k=20, top_p=0.9))
