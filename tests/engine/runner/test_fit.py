"""Models that do not fit the memory of their device are refused before they are loaded."""

import contextlib
import logging
from dataclasses import replace

import pytest
import torch

from parrot.engine.config import BuiltinInstance
from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.models.tensors import num_weights
from parrot.engine.runner import fit
from parrot.engine.runner.fit import require_fit
from parrot.engine.runner.kv_cache import KVLayout
from parrot.engine.runner.sizes import KvSizes
from parrot.utils.config import ConfigError

GIB = 1 << 30
SPEC = open_checkpoint("llama-3.1-8b", dummy=True).spec
LAYOUT = KVLayout.of(SPEC, 64, torch.bfloat16)  # A block takes 8 MiB.
ONE = KvSizes(LAYOUT, 1)
GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


def with_free(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    memory = int(free * GIB), 24 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: memory)
    monkeypatch.setattr(fit, "available_memory", lambda: memory[0])


def test_weights_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 14.5)
    with pytest.raises(ConfigError, match=r"big does not fit: .* 15\.0 GiB .*of the 24\.0 GiB of"):
        require_fit("big", SPEC, ONE, BuiltinInstance(), GPU)
    with pytest.raises(ConfigError, match=r"14\.5 GiB of CPU memory are free; use a smaller"):
        require_fit("big", SPEC, ONE, BuiltinInstance(), CPU)


def test_kv_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 16.0)
    many = KvSizes(LAYOUT, 200)
    with pytest.raises(ConfigError, match=r"200 KV blocks of 64 tokens take 1\.6 GiB.* most 133"):
        require_fit("big", SPEC, many, BuiltinInstance(), GPU)
    require_fit(
        "big", SPEC, many, BuiltinInstance(), CPU
    )  # The OS reserves pages of CPU memory at their first write.


@pytest.mark.parametrize(("is_tied", "ranks"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_a_head_in_codes_is_counted(
    monkeypatch: pytest.MonkeyPatch, is_tied: bool, ranks: int
) -> None:
    """A tied head takes memory in addition to the embedding."""
    spec = replace(SPEC, tie_embeddings=is_tied)
    head = 128256 * 4096 // ranks
    num_copies = 1 if is_tied else 2  # Ranks divide the embedding and the head by tokens.
    needed = 2 * (num_weights(spec) - num_copies * (ranks - 1) * head) + ONE.num_bytes
    needed += 1.0625 * head - (0 if is_tied else 2 * head)
    for free, fits in ((needed + 1, True), (needed - 1, False)):
        with_free(monkeypatch, free / GIB)
        refusal = pytest.raises(ConfigError, match="GiB with quantised matrices")
        with contextlib.nullcontext() if fits else refusal:
            instance = BuiltinInstance(tensor_parallel=ranks)
            require_fit("big", spec, ONE, instance, GPU, head_bytes=1.0625)


def test_memory_of_a_model_that_fits_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_free(monkeypatch, 20.0)
    with caplog.at_level(logging.INFO, "parrot.engine.runner.fit"):
        require_fit(
            "big", SPEC, replace(ONE, layout=replace(LAYOUT, block_size=16)), BuiltinInstance(), GPU
        )
    [line] = caplog.messages
    assert "weights take 15.0 GiB as torch.bfloat16, KV 128.0 KiB per token" in line
    assert "20.0 are free" in line
