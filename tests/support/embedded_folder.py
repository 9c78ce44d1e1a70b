"""The embedded model as a folder, for programs that do not read GGUF files or for a test with
another chat template."""

import json
from pathlib import Path

from safetensors.torch import save_file

from parrot.engine.models.checkpoint import open_checkpoint


def write_embedded_folder(folder: Path, chat_template: str | None = None) -> Path:
    """Write config.json, model.safetensors (float32) and the tokenizer to `folder`, which is
    created. `chat_template` replaces the model's own template."""
    checkpoint = open_checkpoint("embedded")
    tokenizer = checkpoint.load_tokenizer()
    ids = tokenizer.special_ids
    folder.mkdir(parents=True, exist_ok=True)
    kind = {"model_type": "llama", "hidden_act": "silu", "torch_dtype": "float32"}
    config = checkpoint.config | kind | {"bos_token_id": ids.bos, "eos_token_id": ids.eos[0]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer.tokenizer_json)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": chat_template or tokenizer.chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tensors = {name: checkpoint.take(name).contiguous() for name in checkpoint.plans}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
