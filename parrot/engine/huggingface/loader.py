"""From a configuration to a model of transformers, ready to run steps."""

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch

from parrot.engine.config import HuggingFaceConfig
from parrot.engine.huggingface.runner import HuggingFaceRunner
from parrot.engine.models.checkpoint import (
    EMBEDDED,
    Checkpoint,
    open_checkpoint,
    open_tokenizer,
    resolve_device,
    resolve_dtype,
)
from parrot.protocol.engine_api import TokenizerResponse
from parrot.utils.config import ConfigError

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_UNKNOWN_MAX_LEN = 2048


def load_runner(config: HuggingFaceConfig) -> tuple[HuggingFaceRunner, TokenizerResponse]:
    """Load what the config names; takes seconds to minutes. Raises `ConfigError` for a model that
    is not there or that cannot be served. No code of a model's repository is ever run."""
    device = resolve_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(os.cpu_count() or 1)
    dtype = resolve_dtype(config.dtype, device)
    started = time.perf_counter()
    if config.model == EMBEDDED or Path(config.model).suffix == ".gguf":
        checkpoint = open_checkpoint(config.model)
        model, tokenizer = _from_gguf(checkpoint, dtype), checkpoint.load_tokenizer()
    else:
        model, tokenizer = _from_pretrained(config.model, dtype), None
    if config.tokenizer or tokenizer is None:
        tokenizer = open_tokenizer(config.tokenizer or config.model)
    runner = HuggingFaceRunner(
        model.to(device).eval(),
        num_blocks=-(-config.instance.max_cached_tokens // _BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        max_seq_len=_max_seq_len(model, config.instance.max_seq_len),
    )
    logger.info("loaded %s in %.1f s", config.model, time.perf_counter() - started)
    return runner, tokenizer


def _from_pretrained(name: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, trust_remote_code=False, use_safetensors=True
        )
    except MemoryError:
        raise
    except Exception as error:
        logger.debug("%s", name, exc_info=True)
        raise ConfigError(f"{name}: transformers cannot load it: {error}") from None


def _from_gguf(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """With the builtin engine's reader: transformers' own takes 13 s for 135M parameters and needs
    another package."""
    import transformers

    given = dict(checkpoint.config)
    rope = given["rope_parameters"]
    if rope["rope_type"] == "factors":
        raise ConfigError(f"{checkpoint.source}: transformers cannot take this file's rope factors")
    if rope["rope_type"] == "default":
        given["rope_parameters"] = {key: rope[key] for key in ("rope_type", "rope_theta")}
    model_class = getattr(transformers, given["architectures"][0])
    return model_class.from_pretrained(
        None,
        config=model_class.config_class(**given),
        trust_remote_code=False,
        state_dict={name: checkpoint.take(name) for name in checkpoint.shapes},
        dtype=dtype,
    )


def _max_seq_len(model: Any, wanted: int | None) -> int:
    own = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if own is None:
        return wanted or _UNKNOWN_MAX_LEN
    return min(wanted or own, int(own))
