"""The format of a model's matrices on each kind of device."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.models import decoder, gguf_file
from parrot.engine.models.checkpoint import (
    Checkpoint,
    load_decoder,
    open_checkpoint,
    resolve_dtype,
)
from parrot.engine.models.codes import CodedMatrix, CodeFormat
from parrot.engine.models.ggml_blocks import GPU_FORMATS
from parrot.engine.models.packed import Head, Weights
from parrot.engine.models.parallel import Partition
from parrot.engine.models.tensors import head_name, is_matrix, num_matrix_weights
from parrot.engine.models.words_linear import WordsLinear, words_of
from parrot.engine.runner import load
from parrot.engine.runner import weights as module
from parrot.engine.runner.ranks.group import RankGroup
from parrot.engine.runner.weights import (
    bytes_of_head,
    bytes_of_matrices,
    choose_head,
    choose_weights,
)
from parrot.utils.config import ConfigError
from tests.support.four_bit_checkpoints import quantise_folder
from tests.support.gguf_models import Kind, write_gguf
from tests.support.tiny_model import make_tiny_model

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
BF16 = torch.bfloat16
FP8 = {"quant_method": "fp8"}
BLOCKS = FP8 | {"weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64}
LARGE = open_checkpoint("llama-3.1-8b", dummy=True)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    with_device(monkeypatch, (9, 0))


def with_device(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *, triton: bool = True
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(module, "find_spec", lambda name: find_spec("torch") if triton else None)


def quantised(found: Mapping[str, Any]) -> Checkpoint:
    return replace(LARGE, config=LARGE.config | {"quantization_config": found})


def chosen(
    checkpoint: Checkpoint, dtype: str = "auto", device: torch.device = GPU, **options: Any
) -> Weights:
    config = BuiltinConfig(model="any", dtype=dtype)
    return choose_weights(config, checkpoint, options.get("shard"), device, BF16)


@pytest.mark.parametrize("found", [FP8, BLOCKS, AWQ])
def test_quantised_matrices_are_kept_by_auto(found: Mapping[str, Any]) -> None:
    assert chosen(quantised(found)) is Weights.KEPT
    assert chosen(quantised(found), "bfloat16") is Weights.PLAIN
    assert chosen(quantised(found), device=CPU) is Weights.KEPT


@pytest.mark.parametrize(
    ("found", "capability", "triton", "reason"),
    [
        (FP8, (8, 6), True, "capability 8.9 or later"),
        (FP8, (9, 0), False, "needs Triton"),
        (AWQ, (7, 5), True, "capability 8.0 or later"),
        (AWQ, (9, 0), False, "needs Triton"),
        (AWQ | {"group_size": 24}, (9, 0), True, "their format has groups of 24 inputs"),
    ],
)
def test_a_device_without_kernels_converts_quantised_matrices(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    found: Mapping[str, Any],
    capability: tuple[int, int],
    triton: bool,
    reason: str,
) -> None:
    with_device(monkeypatch, capability, triton=triton)
    with caplog.at_level(logging.WARNING, module.__name__):
        assert chosen(quantised(found)) is Weights.PLAIN
    [line] = caplog.messages
    assert line.startswith("quantised weights are converted to torch.bfloat16")
    assert reason in line
    caplog.clear()
    chosen(LARGE)
    assert not caplog.messages


def test_a_gguf_file_is_converted_by_a_device_without_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_device(monkeypatch, (7, 5))
    assert chosen(with_formats({"any": CodeFormat(8, 32)})) is Weights.PLAIN
    assert "capability 8.0 or later" in caplog.text


def test_four_bits_need_no_conversions_of_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    with_device(monkeypatch, (8, 0))
    assert chosen(quantised(AWQ)) is Weights.KEPT


def test_matrices_of_other_sizes_are_converted_or_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plans = dict(LARGE.plans)
    name = "model.layers.3.mlp.up_proj.weight"
    plans[name] = replace(plans[name], shape=(14336, 4100))
    odd = replace(quantised(FP8), plans=plans)
    assert chosen(odd) is Weights.PLAIN
    assert f"{name} is [14336, 4100]" in caplog.text
    with pytest.raises(
        ConfigError, match=r"`dtype`: fp8 needs matrices .* is \[14336, 4100\]; use"
    ):
        chosen(odd, "fp8")
    assert chosen(LARGE, "fp8") is Weights.E4M3


def test_each_rank_checks_its_own_part(caplog: pytest.LogCaptureFixture) -> None:
    narrow = open_checkpoint("llama-3.1-8b", dummy=True)
    spec = narrow.spec.with_layers(
        lambda _, layer: replace(layer, mlp=replace(layer.mlp, width=14336 + 16))
    )
    plans = {
        name: replace(plan, shape=tuple(14352 if size == 14336 else size for size in plan.shape))
        for name, plan in narrow.plans.items()
    }
    odd = replace(quantised(FP8), spec=spec, plans=plans)
    assert chosen(odd) is Weights.KEPT
    assert chosen(odd, shard=Partition(spec, RankGroup(0, 2))) is Weights.PLAIN
    assert "is [7176, 4096]" in caplog.text


@pytest.mark.parametrize(
    ("found", "device", "expected"),
    [
        (FP8, GPU, 1.0),
        (BLOCKS, GPU, 1.0),
        (FP8 | {"weight_block_size": [64, 128]}, GPU, None),
        (AWQ, GPU, 0.5 + 4 / 64),
        (AWQ | {"group_size": -1}, GPU, 0.5 + 4 / 128),
        (AWQ, CPU, None),
        (None, GPU, None),
    ],
)
def test_bytes_of_a_number(
    found: Mapping[str, Any] | None, device: torch.device, expected: float | None
) -> None:
    config = {} if found is None else {"quantization_config": found}
    assert Weights.KEPT.matrix_bytes(config, device) == expected
    assert Weights.PLAIN.matrix_bytes(config, device) is None
    assert Weights.E4M3.matrix_bytes({}, device) == 1.0


def with_formats(formats: Mapping[str, CodeFormat]) -> Checkpoint:
    return replace(LARGE, gpu_formats=formats)


def mean_bytes(checkpoint: Checkpoint, weights: Weights = Weights.KEPT, ranks: int = 1) -> Any:
    shard = None if ranks == 1 else Partition(checkpoint.spec, RankGroup(1, ranks))
    return bytes_of_matrices(weights, checkpoint, shard, GPU, BF16)


def test_bytes_of_a_number_in_a_gguf_file() -> None:
    """A product has the bytes of the matrix that the device keeps. q, k and v are one matrix."""
    four, wide = CodeFormat(4, 32), CodeFormat(4, 4096)
    names = list(filter(is_matrix, LARGE.plans))
    matrices = 218_103_808  # Matrix weights of a layer.
    whole = dict.fromkeys(names, four)
    assert mean_bytes(with_formats(whole)) == 0.5 + 4 / 32
    assert mean_bytes(with_formats(whole), Weights.PLAIN) is None
    assert mean_bytes(with_formats({})) is None
    down = [name for name in names if name.endswith("down_proj.weight")]
    some = mean_bytes(with_formats(dict.fromkeys(down, four)))
    assert some == pytest.approx(2 - 1.375 * 14336 * 4096 / matrices)
    without_v = {name: four for name in names if "v_proj" not in name}
    rest = matrices - 6144 * 4096
    assert mean_bytes(with_formats(without_v)) == pytest.approx(2 - 1.375 * rest / matrices)
    split = mean_bytes(with_formats(whole | dict.fromkeys(down, wide)), ranks=8)
    assert split == pytest.approx(0.625 + 1.375 * 14336 * 4096 / matrices)


def test_the_types_of_a_gguf_file_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The estimate equals the number of bytes of a loaded decoder."""
    write_gguf(tmp_path / "model.gguf", kind=Kind.Q4_0)
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    assert mean_bytes(checkpoint) == 0.5 + 4 / 32
    assert open_checkpoint(checkpoint.source, dummy=True).gpu_formats == {}
    kinds = {"attn_v": Kind.Q6_K, "attn_o": Kind.Q8_0, "ffn_down": Kind.Q8_0, "blk": Kind.Q4_K}
    sizes = {"hidden_size": 256, "intermediate_size": 128}
    write_gguf(tmp_path / "types.gguf", kind=kinds, sizes=sizes)
    # Number of rows of 256 numbers for each size of a number.
    rows = {1.25: 64 + 32 + 32, 1.125: 64 + 128, 0.625: 2 * 128}
    expected = sum(size * count for size, count in rows.items()) / sum(rows.values())
    checkpoint = open_checkpoint(str(tmp_path / "types.gguf"))
    assert mean_bytes(checkpoint) == pytest.approx(expected)

    def words_linear(parts: list[CodedMatrix], bias: None) -> WordsLinear:
        words = words_of(CodedMatrix.joined(parts))
        assert words is not None
        return WordsLinear(words, bias)

    monkeypatch.setattr(decoder, "packed_linear", words_linear)
    monkeypatch.setattr(gguf_file, "CPU_TYPES", GPU_FORMATS)
    model = load_decoder(checkpoint, BF16, CPU, weights=Weights.KEPT)
    linears = [x for layer in model.layers for x in layer.linears if isinstance(x, WordsLinear)]
    num_bytes = sum(linear.matrix.num_bytes for linear in linears)
    assert num_bytes == pytest.approx(expected * num_matrix_weights(checkpoint.spec))
    write_gguf(tmp_path / "other.gguf", kind=Kind.F16)
    assert mean_bytes(open_checkpoint(str(tmp_path / "other.gguf"))) is None


def test_matrices_of_four_bits_are_counted_by_name(tmp_path: Path) -> None:
    """A checkpoint may have plain matrices next to those in codes."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    plain = make_tiny_model(tmp_path / "plain", "llama", overrides=sizes)
    quantise_folder(plain, tmp_path / "model", "awq", 32)
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["group_size"] = 32
    path.write_text(json.dumps(config))
    checkpoint = open_checkpoint(str(tmp_path / "model"))
    assert checkpoint.gpu_formats == dict.fromkeys(
        filter(is_matrix, checkpoint.plans), CodeFormat(4, 32)
    )
    assert mean_bytes(checkpoint) == 0.5 + 4 / 32
    assert open_checkpoint(checkpoint.source, dummy=True).gpu_formats == {}


HEAD = head_name(LARGE.spec)
TIED = replace(LARGE, spec=replace(LARGE.spec, tie_embeddings=True))


def chosen_head(
    checkpoint: Checkpoint = LARGE,
    head_dtype: str = "int8",
    device: torch.device = GPU,
    weights: Weights = Weights.KEPT,
    dtype: str = "auto",
) -> Head:
    found = {"model": "any", "dtype": dtype, "instance": {"head_dtype": head_dtype}}
    config = BuiltinConfig.model_validate(found)
    return choose_head(config, checkpoint, weights, device, resolve_dtype(dtype, device))


def test_auto_keeps_a_head_in_codes_on_a_gpu() -> None:
    coded = with_formats({HEAD: CodeFormat(8, 16)})
    assert chosen_head(coded, "auto") is Head.KEPT
    assert bytes_of_head(Head.KEPT, coded) == 1 + 4 / 16
    assert chosen_head(coded, "auto", CPU) is Head.PLAIN
    assert chosen_head(coded, "auto", weights=Weights.PLAIN) is Head.PLAIN
    assert chosen_head(coded, "auto", weights=Weights.E4M3) is Head.PLAIN
    assert chosen_head(LARGE, "auto") is Head.PLAIN
    assert chosen_head(quantised(FP8), "auto") is Head.PLAIN
    tied = open_checkpoint("embedded")
    assert tied.gpu_formats
    assert chosen_head(tied, "auto") is Head.PLAIN
    assert bytes_of_head(Head.PLAIN, coded) is None


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "fp8"])
@pytest.mark.parametrize("checkpoint", [LARGE, TIED, with_formats({HEAD: CodeFormat(4, 32)})])
def test_int8_rounds_every_head(checkpoint: Checkpoint, dtype: str) -> None:
    assert chosen_head(checkpoint, dtype=dtype) is Head.INT8
    assert bytes_of_head(Head.INT8, checkpoint) == 1 + 4 / 64


@pytest.mark.parametrize(
    ("device", "capability", "triton", "dtype", "reason"),
    [
        (CPU, (9, 0), True, "bfloat16", "needs Triton and a CUDA device of .* 8.0 or later"),
        (GPU, (7, 5), True, "auto", "needs .* compute capability 8.0 or later"),
        (GPU, (9, 0), False, "auto", "needs Triton"),
        (GPU, (9, 0), True, "float16", "needs bfloat16, and `dtype` is float16"),
        (GPU, (9, 0), True, "float32", "needs bfloat16, and `dtype` is float32"),
    ],
)
def test_int8_without_kernels_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    capability: tuple[int, int],
    triton: bool,
    dtype: str,
    reason: str,
) -> None:
    with_device(monkeypatch, capability, triton=triton)
    with pytest.raises(ConfigError, match=f"`instance.head_dtype`: int8 {reason}.*; use auto"):
        chosen_head(device=device, dtype=dtype)


def test_int8_needs_whole_groups() -> None:
    for width, size in ((96, 32), (48, 16)):
        narrow = replace(LARGE, spec=replace(LARGE.spec, embed_dim=width))
        assert chosen_head(narrow) is Head.INT8
        assert bytes_of_head(Head.INT8, narrow) == 1 + 4 / size
    odd = replace(LARGE, spec=replace(LARGE.spec, embed_dim=72))
    with pytest.raises(ConfigError, match=r"`instance\.head_dtype`: int8 .* 16 divides.* has 72"):
        chosen_head(odd)


def test_a_cpu_refuses_int8_before_it_loads_the_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model")
    monkeypatch.setattr(load, "load_decoder", None)
    found = {"model": str(folder), "device": "cpu", "instance": {"head_dtype": "int8"}}
    with pytest.raises(ConfigError, match=r"`instance\.head_dtype`: int8 needs Triton"):
        load.load_runner(BuiltinConfig.model_validate(found))
