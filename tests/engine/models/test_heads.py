"""Matrices for logits in codes: rounding to eight bits, and decoders with such a head."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from parrot.engine.models import gguf_file
from parrot.engine.models.checkpoint import Checkpoint, load_decoder, open_checkpoint
from parrot.engine.models.codes import CodedMatrix, CodeFormat
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.ggml_blocks import GPU_FORMATS
from parrot.engine.models.packed import Head
from parrot.engine.models.parallel import Partition
from parrot.engine.models.tensors import OWN, head_name
from parrot.engine.models.words_linear import WordsLinear, matrix_of, words_of
from parrot.engine.runner.ranks.group import RankGroup
from tests.support.four_bit_checkpoints import awq, quantise_folder, rounded
from tests.support.gguf_models import Kind, untie, write_gguf
from tests.support.rank_threads import on_ranks
from tests.support.tiny_model import make_tiny_model

HEAD = f"{OWN.lm_head}.weight"
CPU = torch.device("cpu")
TOKENS = torch.tensor([0, 258, 77, 64, 65, 130])
SMALLEST = 2.0**-126  # The smallest normal number of float32 and bfloat16.


@given(
    st.sampled_from([(16, 16), (48, 16), (96, 32), (64, 64), (576, 64)]),
    st.integers(1, 40),
    st.integers(-130, 120),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 99),
)
def test_a_number_changes_by_at_most_half_a_scale(
    size: tuple[int, int], rows: int, exponent: int, dtype: torch.dtype, seed: int
) -> None:
    """Also numbers beyond the range of float16. The layout of the kernels holds all of them."""
    inputs, group = size
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, inputs, generator=generator) * 2.0**exponent
    numbers[0] *= 2.0**-8
    numbers[rows // 2, : group // 2] = 0.0
    numbers = numbers.to(dtype)
    matrix = CodedMatrix.rounded(numbers)
    assert CodeFormat.int8(inputs) == CodeFormat(matrix.bits, matrix.group) == CodeFormat(8, group)
    assert (matrix.codes.shape, matrix.scales.shape) == ((rows, inputs), (rows, inputs // group))
    assert int(matrix.codes.min()) >= -127
    error = (matrix.numbers() - numbers.float()).abs()
    bound = matrix.scales.repeat_interleave(group, 1) * 0.5001
    assert bool((error <= torch.where(bound < SMALLEST, SMALLEST, bound)).all())
    largest = numbers.float().abs().view(rows, -1, group).amax(2)
    assert bool((matrix.scales <= largest / 127 * (1 + 2**-8) + SMALLEST).all())
    words = words_of(matrix)
    assert words is not None
    assert words.shift == 0
    assert torch.equal(matrix_of(words).numbers(), matrix.numbers())


def test_groups_of_zeros_and_of_usual_numbers() -> None:
    numbers = torch.randn(5000, 128) * 0.02  # More rows than are rounded at once.
    numbers[3, 64:] = numbers[4999] = 0.0
    matrix = CodedMatrix.rounded(numbers)
    assert not matrix.scales[3, 1]
    assert not matrix.codes[3, 64:].any()
    assert not matrix.scales[4999].any()
    error = (matrix.numbers() - numbers).abs()
    assert bool((error <= matrix.scales.repeat_interleave(64, 1) * 0.5001).all())
    words = words_of(matrix)
    assert words is not None
    assert words.has_half_scales
    assert words.num_bytes == 5000 * 128 * 1.0625


def test_numbers_that_are_not_finite_stay_so() -> None:
    numbers = torch.ones(2, 128)
    numbers[0, 3], numbers[1, 70] = float("nan"), float("inf")
    found = CodedMatrix.rounded(numbers).numbers()
    assert found.isfinite().view(2, 2, 64).all(2).tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize("inputs", [1, 8, 72, 100])
def test_a_width_without_whole_groups_is_refused(inputs: int) -> None:
    assert CodeFormat.int8(inputs) is None
    with pytest.raises(ValueError, match=f"16 does not divide {inputs} columns"):
        CodedMatrix.rounded(torch.ones(4, inputs))


def attend_to_all(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of every row to every row. These tests need no other kind."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(0, 1).flatten(1)


@torch.inference_mode()
def states_and_logits(model: Decoder) -> tuple[torch.Tensor, torch.Tensor]:
    """The final states and the logits of `TOKENS`."""
    hidden = model.forward(TOKENS, torch.arange(len(TOKENS)), attend_to_all)
    return model.final(hidden), model.logits(hidden)


def tiny(folder: Path, *, is_tied: bool) -> Checkpoint:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "tie_word_embeddings": is_tied}
    return open_checkpoint(str(make_tiny_model(folder, "llama", overrides=sizes)))


def head_of(checkpoint: Checkpoint) -> torch.Tensor:
    return checkpoint.take(head_name(checkpoint.spec))


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_decoder_with_a_head_of_eight_bits(tmp_path: Path, is_tied: bool) -> None:
    checkpoint = tiny(tmp_path / "model", is_tied=is_tied)
    exact = load_decoder(checkpoint, torch.float32, CPU)
    model = load_decoder(checkpoint, torch.float32, CPU, head=Head.INT8)
    assert torch.equal(model.embed, exact.embed)
    (states, plain_logits), (other_states, logits) = map(states_and_logits, (exact, model))
    torch.testing.assert_close(other_states, states)
    numbers = CodedMatrix.rounded(head_of(checkpoint)).numbers()
    torch.testing.assert_close(logits, states @ numbers.T, rtol=1e-5, atol=1e-5)
    error = (logits - plain_logits).norm() / plain_logits.norm()
    assert 0.0 < float(error) < 0.01
    assert isinstance(model.lm_head, WordsLinear)
    head = 259 * 64
    assert model.num_head_codes == head
    assert exact.num_head_codes == exact.num_converted(1000) == model.num_converted(128) == 0
    assert model.num_converted(129) == head
    # A tied embedding on a CPU also has a packed copy, which the codes replace.
    assert exact.num_bytes - model.num_bytes == head * (4 - 1.0625)


@pytest.mark.parametrize("is_tied", [False, True])
def test_ranks_divide_a_head_of_eight_bits(tmp_path: Path, is_tied: bool) -> None:
    """Two ranks have 130 tokens each, and the last rank has a row of padding."""
    checkpoint = tiny(tmp_path / "model", is_tied=is_tied)
    whole = load_decoder(checkpoint, torch.float32, CPU, head=Head.INT8)
    _, want = states_and_logits(whole)

    def compute(ranks: RankGroup) -> tuple[torch.Tensor, int]:
        shard = Partition(checkpoint.spec, ranks)
        model = load_decoder(checkpoint, torch.float32, CPU, head=Head.INT8, shard=shard)
        return states_and_logits(model)[1], model.num_head_codes

    for logits, num_codes in on_ranks(2, compute):
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-4)
        assert num_codes == 130 * 64


def test_a_head_of_four_bits_is_kept(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    plain = make_tiny_model(tmp_path / "plain", "llama", overrides=sizes | {"vocab_size": 264})
    quantise_folder(plain, tmp_path / "model", "awq", 16)
    path = tmp_path / "model" / "model.safetensors"
    one = rounded(load_file(path).pop("lm_head.weight"), 32, symmetric=False)
    others = {name: x for name, x in load_file(path).items() if name != "lm_head.weight"}
    save_file(others | awq("lm_head", one), path)
    config = tmp_path / "model" / "config.json"
    found = json.loads(config.read_text())
    found["quantization_config"]["group_size"] = 16
    config.write_text(json.dumps(found))
    checkpoint = open_checkpoint(str(tmp_path / "model"))
    assert checkpoint.gpu_format(HEAD) == CodeFormat(4, 16)
    exact = load_decoder(checkpoint, torch.float32, CPU)
    kept = load_decoder(checkpoint, torch.float32, CPU, head=Head.KEPT)
    assert isinstance(kept.lm_head, WordsLinear)
    assert torch.equal(matrix_of(kept.lm_head.matrix).numbers(), one.numbers())
    torch.testing.assert_close(states_and_logits(kept), states_and_logits(exact))
    assert kept.num_bytes < exact.num_bytes


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q6_K])
def test_an_untied_head_of_a_gguf_file_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    path = tmp_path / "model.gguf"
    kinds = {"blk": Kind.Q8_0, "output.weight": kind}
    write_gguf(path, change=untie, kind=kinds, sizes={"hidden_size": 256})
    monkeypatch.setattr(gguf_file, "CPU_TYPES", GPU_FORMATS)
    checkpoint = open_checkpoint(str(path))
    assert not checkpoint.spec.tie_embeddings
    assert checkpoint.gpu_format(HEAD) == GPU_FORMATS[kind.value]
    exact = load_decoder(checkpoint, torch.float32, CPU)
    kept = load_decoder(checkpoint, torch.float32, CPU, head=Head.KEPT)
    _, logits = states_and_logits(exact)
    assert isinstance(kept.lm_head, WordsLinear)
    # The scales of Q6_K are rounded.
    error = (states_and_logits(kept)[1] - logits).norm() / logits.norm()
    assert float(error) < 2**-11
    rounded_again = load_decoder(checkpoint, torch.float32, CPU, head=Head.INT8)
    assert isinstance(rounded_again.lm_head, WordsLinear)
    assert rounded_again.lm_head.matrix.group == 64


def test_a_head_that_the_layout_cannot_hold_is_plain(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path / "model", is_tied=False)
    coded = CodedMatrix.rounded(head_of(checkpoint))
    odd = replace(coded, scales=coded.scales * 2.0**40 * 1.0003)
    model = Decoder(
        checkpoint.spec, checkpoint.take, torch.float32, CPU, take_packed={HEAD: odd}.get
    )
    assert not isinstance(model.lm_head, WordsLinear)
    torch.testing.assert_close(
        states_and_logits(model), states_and_logits(load_decoder(checkpoint, torch.float32, CPU))
    )
