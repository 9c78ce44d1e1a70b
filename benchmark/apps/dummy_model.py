"""A model folder without weights, for servers that create random weights themselves."""

import json
import shutil
from pathlib import Path

from parrot.engine.models.tokenizers import word_tokenizer

MODELS = Path(__file__).parent / "models"


def write_dummy_model(shape: str, folder: Path) -> None:
    """`vllm serve FOLDER --load-format dummy` then reads and writes the same tokens as our engine
    does with `load_format: dummy`. Raises `ValueError` for an unknown shape."""
    source = MODELS / shape / "config.json"
    if not source.exists():
        known = ", ".join(sorted(path.name for path in MODELS.iterdir()))
        raise ValueError(f"no shape {shape!r}: {known}")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, folder)
    vocab_size = json.loads(source.read_text())["vocab_size"]
    (folder / "tokenizer.json").write_text(word_tokenizer(vocab_size).tokenizer_json)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
