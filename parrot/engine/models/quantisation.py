"""Which quantised safetensors checkpoints can be read (`quantization_config`)."""

from typing import Any

from parrot.engine.models.spec import HFConfig
from parrot.utils.config import ConfigError

_E4M3_METHODS = ("fp8", "compressed-tensors")
_E4M3_FORMAT = "float-quantized"  # The format of compressed-tensors.
_READABLE = "FP8 (`fp8`, or `compressed-tensors` with `float-quantized`) and GGUF files"


def has_row_factors(config: HFConfig) -> bool:
    """Whether matrices are in e4m3 with a factor for each row or one for all."""
    return bool(config.get("quantization_config")) and block_size(config) is None


def require_readable(config: HFConfig) -> None:
    """Raise `ConfigError` for a format that cannot be read."""
    found = config.get("quantization_config")
    if not found:
        return
    method = found.get("quant_method") if isinstance(found, dict) else None
    kind = found.get("format") if method == "compressed-tensors" else _E4M3_FORMAT
    if method not in _E4M3_METHODS or kind != _E4M3_FORMAT:
        shown = method if kind == _E4M3_FORMAT else f"{method} {kind}"
        raise ConfigError(
            f"quantised weights of the format {shown!r:.200} are not supported; the engine reads "
            f"{_READABLE}. Use one of them, or serve the model with vLLM or SGLang and start "
            "`parrot up URL`"
        )
    if found.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(f"quantised weights in {found['fmt']!r:.200} are not supported; use e4m3")


def block_size(config: HFConfig) -> tuple[int, int] | None:
    """Rows and columns of a block of numbers with one factor. None: factors for rows or matrices.

    Raises `ConfigError`."""
    found = config.get("quantization_config")
    if not found:
        return None
    size: Any = found.get("weight_block_size")
    for group in (found.get("config_groups") or {}).values():
        size = size or (group.get("weights") or {}).get("block_structure")
    if size is None:
        return None
    if not (
        isinstance(size, list) and len(size) == 2 and all(x in range(1, 1 << 20) for x in size)
    ):
        raise ConfigError(f"`weight_block_size` is {size!r:.100}, not two numbers")
    return size[0], size[1]
