"""Which quantised safetensors checkpoints can be read (`quantization_config`)."""

from enum import Enum
from typing import Any

from parrot.engine.models.spec import HFConfig
from parrot.utils.config import ConfigError

_FP8 = ("fp8", "compressed-tensors float-quantized")
_PACKED = "compressed-tensors pack-quantized"
_READABLE = (
    "FP8 (`fp8`, or `compressed-tensors` with `float-quantized`), four bits (`awq`, `gptq`, or "
    "`compressed-tensors` with `pack-quantized`) and GGUF files"
)


_DEFAULT_GROUP = 128


class FourBitFormat(Enum):
    """The formats of matrices of four bits in safetensors."""

    AWQ = "awq"
    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"
    PACKED = "pack-quantized"


def stays_e4m3(config: HFConfig) -> bool:
    """Whether the products of a GPU can have the matrices of a checkpoint in e4m3.

    They have one factor, a factor for each row, or one for each block of 128 x 128 numbers."""
    is_fp8 = bool(config.get("quantization_config")) and four_bit_format(config) is None
    return is_fp8 and block_size(config) in (None, (128, 128))


def require_readable(config: HFConfig) -> None:
    """Raise `ConfigError` for a format that cannot be read."""
    found = config.get("quantization_config")
    if not found:
        return
    kind = _kind(config)
    if kind not in _FP8 and four_bit_format(config) is None:
        raise ConfigError(
            f"quantised weights of the format {kind!r:.200} are not supported; the engine reads "
            f"{_READABLE}. Use one of them, or serve the model with vLLM or SGLang and start "
            "`parrot up URL`"
        )
    if found.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(f"quantised weights in {found['fmt']!r:.200} are not supported; use e4m3")


def four_bit_format(config: HFConfig) -> FourBitFormat | None:
    """The format of matrices of four bits; None for checkpoints without them.

    Raises `ConfigError` for a variant that cannot be read."""
    found, kind = config.get("quantization_config"), _kind(config)
    if not isinstance(found, dict) or kind not in ("awq", "gptq", _PACKED):
        return None
    if kind == _PACKED:
        groups = found.get("config_groups")
        schemes = groups.values() if isinstance(groups, dict) else ()
        weights = [x.get("weights") if isinstance(x, dict) else None for x in schemes] or [None]
        for one in weights:
            _require(
                kind, one if isinstance(one, dict) else {}, {"num_bits": (4,), "type": ("int",)}
            )
        return FourBitFormat.PACKED
    own = {"bits": found.get("bits", found.get("w_bit", 4))}
    _require(kind, own, {"bits": (4,)})
    if kind == "awq":
        _require(
            kind, {"version": str(found.get("version", "gemm")).lower()}, {"version": ("gemm",)}
        )
        return FourBitFormat.AWQ
    version = found.get("checkpoint_format") or found.get("format") or "gptq"
    _require(kind, {"checkpoint_format": version}, {"checkpoint_format": ("gptq", "gptq_v2")})
    return FourBitFormat(version)


def group_size(config: HFConfig) -> int | None:
    """Inputs with one scale, as a checkpoint with four bits names them; None for other formats."""
    if four_bit_format(config) is None:
        return None
    found = config["quantization_config"]
    schemes = [x.get("weights") or {} for x in (found.get("config_groups") or {}).values()]
    sizes = [x.get("group_size") for x in (found, *schemes)]
    return next((x for x in sizes if isinstance(x, int) and x > 0), _DEFAULT_GROUP)


def _kind(config: HFConfig) -> Any:
    """The method, with the format of compressed-tensors."""
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        return None
    method = found.get("quant_method")
    return f"{method} {found.get('format')}" if method == "compressed-tensors" else method


def _require(kind: str, found: dict[str, Any], supported: dict[str, tuple[Any, ...]]) -> None:
    """Raise `ConfigError` if a value is not one of those that are supported."""
    for name, values in supported.items():
        value = found.get(name)
        if value not in values:
            shown = " or ".join(map(str, values))
            raise ConfigError(
                f"quantised weights of the format {kind!r} with `{name}` {value!r:.100} are not "
                f"supported; the engine reads {shown}"
            )


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
