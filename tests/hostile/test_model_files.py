"""Hostile model files give a clear error within time and memory limits. Their code never runs."""

import json
import os
import pickle
import resource
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parrot.engine.config import HuggingFaceConfig
from parrot.engine.huggingface import load_runner
from parrot.engine.models.checkpoint import open_checkpoint, open_tokenizer
from parrot.utils.config import ConfigError
from tests.support.tiny_model import make_tiny_model

WITHIN_CPU_S = 5.0  # Generous, because the machine may be slow.
WITHIN_KB = 300 * 1024


@pytest.fixture(autouse=True)
def bounds() -> Iterator[None]:
    """Check that the block takes no more time and memory than a real model of that size."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    yield
    assert time.process_time() - began < WITHIN_CPU_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss < WITHIN_KB


def string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def value(key: str, kind: int, raw: bytes) -> bytes:
    return string(key.encode()) + struct.pack("<I", kind) + raw


def header(*values: bytes, num_values: int | None = None, tensors: bytes = b"") -> bytes:
    count = len(values) if num_values is None else num_values
    num_tensors = 2**40 if tensors == b"many" else int(bool(tensors))
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count) + b"".join(values) + tensors


NESTED = b"".join(struct.pack("<IQ", 9, 1) for _ in range(100_000))
LLAMA = value("general.architecture", 8, string(b"llama"))


def tensor(*dims: int, kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", dim) for dim in dims)
    return string(b"token_embd.weight") + shape + struct.pack("<IQ", kind, offset)


def sizes(**changes: int) -> list[bytes]:
    keys = {
        "embedding_length": 64, "attention.head_count": 2, "block_count": 2,
        "feed_forward_length": 96, "context_length": 512,
    }  # fmt: skip
    keys |= {key.replace("__", "."): number for key, number in changes.items()}
    numbers = [value(f"llama.{key}", 10, struct.pack("<Q", n)) for key, n in keys.items()]
    epsilon = value("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5))
    return [LLAMA, *numbers, epsilon]


GGUF = {
    "no end of values": header(num_values=2**60),
    "no end of tensors": header(tensors=b"many"),
    "a string without end": header(value("k", 8, string(b"x", 2**62))),
    "a name without end": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63),
    "an array without end": header(value("k", 9, struct.pack("<IQ", 0, 2**60))),
    "an array of strings without end": header(value("k", 9, struct.pack("<IQ", 8, 2**60))),
    "arrays in arrays": header(value("k", 9, NESTED)),
    "an unknown type": header(value("k", 77, b"")),
    "alignment 0": header(value("general.alignment", 4, struct.pack("<I", 0))),
    "alignment of text": header(value("general.alignment", 8, string(b"x"))),
    "endless dimensions": header(tensors=string(b"t") + struct.pack("<I", 2**32 - 1)),
    "no dimensions": header(*sizes(), tensors=tensor()),
    "no sizes": header(LLAMA, tensors=tensor(4, 4)),
    "no heads": header(*sizes(attention__head_count=0), tensors=tensor(4, 4)),
    "20 M layers": header(*sizes(block_count=20_000_000), tensors=tensor(4, 4)),
    "a huge width": header(*sizes(embedding_length=2**62), tensors=tensor(4, 4)),
    "a huge vocabulary": header(*sizes(), tensors=tensor(4, 2**60)),
    "text for a number": header(
        LLAMA, value("llama.embedding_length", 8, string(b"x")), tensors=tensor(4, 4)
    ),
}


@pytest.mark.parametrize("name", GGUF)
def test_gguf_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GGUF[name] + b"\0" * 4096)
    os.truncate(path, 2**33)  # a sparse file, as large as its header says
    for read in (open_checkpoint, open_tokenizer):
        with pytest.raises(ConfigError):
            read(str(path))


def test_a_token_of_a_megabyte_is_not_cut_at_each_character(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tokens = struct.pack("<IQ", 8, 2) + string(b"a" * 2**20) + string(b"b")
    scores = struct.pack("<IQff", 6, 2, 0.0, 0.0)
    path.write_bytes(
        header(
            value("tokenizer.ggml.model", 8, string(b"llama")),
            value("tokenizer.ggml.tokens", 9, tokens),
            value("tokenizer.ggml.scores", 9, scores),
        )
    )
    with pytest.raises(ConfigError, match="more than 1024 characters"):
        open_tokenizer(str(path))


@pytest.mark.parametrize(
    "metadata",
    [
        {"tokenizer.ggml.tokens": (4, [1, 2])},
        {"tokenizer.ggml.tokens": (8, [b"a"]), "tokenizer.ggml.merges": (8, [b"nothing"])},
        {"tokenizer.ggml.tokens": (8, [b"a"]), "tokenizer.ggml.merges": (4, [7])},
        {"tokenizer.ggml.tokens": (8, [b"a"])},
    ],
    ids=str,
)
def test_vocabularies_of_gguf_files(tmp_path: Path, metadata: dict[str, Any]) -> None:
    path = tmp_path / "model.gguf"
    values = [value("tokenizer.ggml.model", 8, string(b"gpt2"))]
    for key, (kind, items) in metadata.items():
        raw = b"".join(string(i) if kind == 8 else struct.pack("<I", i) for i in items)
        values.append(value(key, 9, struct.pack("<IQ", kind, len(items)) + raw))
    path.write_bytes(header(*values))
    with pytest.raises(ConfigError):
        open_tokenizer(str(path))


CONFIGS: list[dict[str, Any]] = [
    {"num_hidden_layers": 20_000_000},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": -1},
    {"num_hidden_layers": 1e400},
    {"num_hidden_layers": "x"},
    {"num_hidden_layers": [1]},
    {"vocab_size": 2**60},
    {"hidden_size": 2**60},
    {"intermediate_size": 2**60},
    {"num_attention_heads": 0, "head_dim": None},
    {"num_attention_heads": 2**40},
    {"num_key_value_heads": -3},
    {"head_dim": 2**50},
    {"max_position_embeddings": -1},
    {"max_position_embeddings": 2**70},
    {"architectures": {"LlamaForCausalLM": 1}},
    {"architectures": [["LlamaForCausalLM"]]},
    {"architectures": 5},
    {"rope_scaling": [1]},
    {"rope_scaling": "x"},
    {"rope_theta": "x"},
    {"rms_norm_eps": {}},
    {"hidden_act": ["silu"]},
    {"quantization_config": {"quant_method": "own"}},
    {"quantization_config": [1]},
]


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_configs(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = make_tiny_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=str(folder)):
        open_checkpoint(str(folder))


FILES: list[tuple[str, Callable[[], bytes]]] = [
    ("config.json", lambda: b"[" * 200_000),
    ("config.json", lambda: b'{"a":' * 200_000),
    ("config.json", lambda: b"\xff\xfe"),
    ("config.json", lambda: b'{"vocab_size": ' + b"9" * 100_000 + b"}"),
    ("tokenizer.json", lambda: b"[" * 200_000),
    ("tokenizer.json", lambda: b"{}"),
    ("tokenizer.json", lambda: b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'),
    ("tokenizer.json", lambda: b"\xff\xfe"),
    ("tokenizer_config.json", lambda: b'{"chat_template": 5}'),
    ("tokenizer_config.json", lambda: b'{"chat_template": [{}]}'),
    ("tokenizer_config.json", lambda: b'{"chat_template": [5]}'),
    ("generation_config.json", lambda: b'{"eos_token_id": "x"}'),
    ("generation_config.json", lambda: b'{"eos_token_id": [[1]]}'),
    ("model.safetensors", lambda: struct.pack("<Q", 2**63 - 1) + b"{}"),
    ("model.safetensors", lambda: struct.pack("<Q", 2) + b"{}"),
    ("model.safetensors", lambda: struct.pack("<Q", 90) + b"[" * 90),
    (
        "model.safetensors",
        lambda: (
            struct.pack("<Q", 74)
            + b'{"model.norm.weight":{"dtype":"F32","shape":[4],"data_offsets":[0,9999]}}'
        ),
    ),
]


@pytest.mark.parametrize(("name", "content"), FILES)
def test_files_of_folders(tmp_path: Path, name: str, content: Callable[[], bytes]) -> None:
    folder = make_tiny_model(tmp_path / "m")
    (folder / name).write_bytes(content())
    with pytest.raises(ConfigError, match=str(folder)):
        open_checkpoint(str(folder)).load_tokenizer()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_file_of_gigabytes_is_not_read(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path / "m")
    os.truncate(folder / name, 2**33) if (folder / name).exists() else None
    with pytest.raises(ConfigError, match="larger than"):
        open_checkpoint(str(folder)).load_tokenizer()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "extra.safetensors"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path / "m")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name == "config.json":
        with pytest.raises(ConfigError, match="not a model folder"):
            open_checkpoint(str(folder))
    else:
        assert open_checkpoint(str(folder)).load_tokenizer().vocab_size


# Canaries: code of a model that creates a file if it runs.


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def with_canaries(folder: Path, flag: Path) -> Path:
    """Fill a model folder with canaries as code, pickles and `auto_map`."""
    module = f"import pathlib\npathlib.Path({str(flag)!r}).touch()\n"
    classes = ("Config", "Model", "Tokenizer")
    for name in ("configuration", "modeling", "tokenization"):
        bodies = "".join(f"class My{one}:\n    pass\n" for one in classes)
        (folder / f"{name}_canary.py").write_text(module + bodies)
    config = json.loads((folder / "config.json").read_text())
    auto = {
        "AutoConfig": "configuration_canary.MyConfig",
        "AutoModelForCausalLM": "modeling_canary.MyModel",
        "AutoTokenizer": ["tokenization_canary.MyTokenizer", "tokenization_canary.MyTokenizer"],
    }
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto}))
    settings = {"auto_map": auto, "tokenizer_class": "MyTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(module + "def generate(): ...\n")
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "./elsewhere", "auto_mapping": auto}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    pickled = pickle.dumps(Canary(flag))
    (folder / "adapter_model.bin").write_bytes(pickled)
    for name in ("pytorch_model.bin", "model.pt", "vocab.pkl", "tokenizer.model", "vocab.txt"):
        (folder / name).write_bytes(pickled)
    return folder


def huggingface(folder: str) -> None:
    load_runner(HuggingFaceConfig(model=folder, device="cpu"))


@pytest.mark.parametrize(
    "what", ["all", "no weights", "an index of pickles", "no tokenizer", "own type"]
)
def test_no_code_of_a_model_runs(tmp_path: Path, what: str) -> None:
    flag = tmp_path / "ran"
    folder = with_canaries(make_tiny_model(tmp_path / "m"), flag)
    if what in ("no weights", "an index of pickles"):
        (folder / "model.safetensors").unlink()
    if what == "an index of pickles":
        pickles = {"model.norm.weight": "pytorch_model.bin", "lm_head.weight": "../model.pt"}
        index = json.dumps({"metadata": {"total_size": 1}, "weight_map": pickles})
        (folder / "model.safetensors.index.json").write_text(index)
        (folder.parent / "model.pt").write_bytes((folder / "model.pt").read_bytes())
    if what == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    if what == "own type":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "canary"}))
    for load in (lambda f: open_checkpoint(f).load_tokenizer(), open_tokenizer, huggingface):
        try:
            load(str(folder))
        except ConfigError:
            assert what != "all"
        assert not flag.exists(), load


@pytest.mark.parametrize(
    "name",
    ["a/..", "../a", "a/b/../../c", "a\0/b", "-/-", "a/b.gguf", "https://x/a", "a//b", "~x/y"],
)
def test_a_name_is_a_folder_a_file_or_the_id_of_a_hub_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invalid name is rejected without a request to the hub."""
    monkeypatch.setattr("socket.getaddrinfo", None)
    for load in (open_checkpoint, open_tokenizer):
        with pytest.raises(ConfigError) as refusal:
            load(name)
        assert "NoneType" not in str(refusal.value)


def test_a_pickle_is_no_gguf_file(tmp_path: Path) -> None:
    flag = tmp_path / "ran"
    for name in ("model.gguf", "model.bin", "model.pt"):
        path = tmp_path / name
        path.write_bytes(pickle.dumps(Canary(flag)))
        for load in (open_checkpoint, open_tokenizer, huggingface):
            with pytest.raises(ConfigError):
                load(str(path))
    assert not flag.exists()
