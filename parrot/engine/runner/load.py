"""Selects and loads the runner for a configuration."""

import logging
import os
import weakref
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from parrot.engine.attention.context_tree import GateConfig
from parrot.engine.attention.torch_attention import cpu_gate
from parrot.engine.config import BuiltinConfig, BuiltinInstance
from parrot.engine.models.checkpoint import (
    Checkpoint,
    LoadedModel,
    load_decoder,
    open_checkpoint,
    open_tokenizer,
    resolve_device,
    resolve_dtype,
)
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.packed import Weights
from parrot.engine.models.parallel import Partition, require_divisible
from parrot.engine.models.spec import DecoderSpec
from parrot.engine.runner.cpu import CpuOptions, MakeLayers, ModelRunner
from parrot.engine.runner.fit import require_fit
from parrot.engine.runner.host.copies import available_memory, host_slots
from parrot.engine.runner.kv_cache import MIB, KVLayout, blocks_in_free_memory
from parrot.engine.runner.ranks import MemoryLayout, RankMember, RankProcesses, Unit
from parrot.engine.runner.ranks.group import RankGroup
from parrot.engine.runner.sizes import KvMemory, KvSizes
from parrot.engine.runner.step_memory import step_bytes
from parrot.engine.runner.weights import (
    E4M3,
    bytes_of_head,
    bytes_of_matrices,
    choose_head,
    choose_weights,
)
from parrot.utils.config import ConfigError

if TYPE_CHECKING:
    from parrot.engine.runner.cuda import CudaRunner

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 16  # Default tokens per block without Triton.
_KERNEL_BLOCK_SIZE = 64  # Default tokens per block with Triton. Wide tiles need a multiple of 64.
_MIN_HEAD_DIM = 16  # Smallest head size of the Triton kernels, in numbers (or pairs of e4m3 codes).
_MAX_HEAD_DIM = 256  # Largest head size whose tiles fit in shared memory.


def load_runner(config: BuiltinConfig) -> "LoadedModel[ModelRunner | CudaRunner]":
    """Load the configured model, which takes seconds to minutes.

    Raises `ConfigError` for settings that cannot be served exactly. With `tensor_parallel`, also
    starts the processes of the other ranks, which exit with the runner."""
    if config.instance.tensor_parallel == 1:
        return load_rank(config, None)
    processes = RankProcesses(config)
    with processes.starting():
        loaded = load_rank(config, processes)
    weakref.finalize(loaded.runner, processes.close)  # Also runs at interpreter exit.
    return loaded


def load_rank(
    config: BuiltinConfig, member: RankMember | None
) -> "LoadedModel[ModelRunner | CudaRunner]":
    """Load this rank's runner. `member` is None without tensor parallelism."""
    device = rank_device(config, member)
    instance = config.instance
    if instance.attn_func == "triton" and device.type == "cpu":
        raise ConfigError("`instance.attn_func`: triton needs a CUDA device; use auto or torch")
    if device.type == "cpu":
        torch.set_num_threads(instance.num_threads or _default_threads(instance.tensor_parallel))
    checkpoint = open_checkpoint(
        config.model, dummy=instance.load_format == "dummy", seed=config.random_seed
    )
    tokenizer = (
        open_tokenizer(config.tokenizer) if config.tokenizer else checkpoint.load_tokenizer()
    )
    checkpoint = checkpoint.for_length(instance.max_seq_len)
    if device.type == "cuda" and not _is_power_of_two(checkpoint.spec.attention.head_dim):
        checkpoint = checkpoint.padded() or checkpoint  # The kernels have no other heads.
    use_triton = device.type == "cuda" and _use_triton(instance, checkpoint.spec, device)
    block_size = instance.block_size or (_KERNEL_BLOCK_SIZE if use_triton else _BLOCK_SIZE)
    shard = _shard(checkpoint, member)
    spec = checkpoint.spec if shard is None else shard.local_spec
    dtype = resolve_dtype(config.dtype, device)
    memory = KvMemory(spec, config, block_size, dtype)
    sizes = memory.with_blocks(instance.num_kv_cache_blocks or 1)
    model, unpacks = _load_model(config, checkpoint, shard, sizes, device)
    unit = None
    if member is not None:
        shared = _shared_memory(config, model, member) if use_triton else None
        unit = member.join(device, shared, with_tables=not use_triton)
    group, report = (None, _no_report) if member is None else (member.group, member.report)
    report("measuring free memory")
    if instance.num_kv_cache_blocks is None:
        limits = config.scheduler
        converted = model.num_converted(min(limits.max_batch_size, limits.max_num_batched_tokens))
        of_steps = step_bytes(spec, limits, dtype, unpacks=unpacks, num_converted=converted)
        sizes = memory.in_memory_of(blocks_for_all(memory.layout, device, group, of_steps))
    if instance.host_kv_gb is not None or (use_triton and config.scheduler.prefix_caching):
        num_bytes = host_bytes_for_all(instance.host_kv_gb, sizes, group)
        sizes = memory.with_host(sizes, num_bytes)
    runner: ModelRunner | CudaRunner
    report("allocating memory")
    if use_triton:
        runner = _warm_cuda_runner(config, model, sizes, unit, report)
    else:
        is_alone = member is None
        runner = _make_torch_runner(config, model, sizes, unit, is_alone=is_alone)
    report(None)
    _log(runner)
    return LoadedModel(runner, tokenizer, checkpoint.default_sampling)


def _load_model(
    config: BuiltinConfig,
    checkpoint: Checkpoint,
    shard: Partition | None,
    sizes: KvSizes,
    device: torch.device,
) -> tuple[Decoder, bool]:
    """The decoder of a rank, and whether large steps convert the matrices of its layers.

    Raises `ConfigError` if the weights do not fit, or cannot have the configured format."""
    spec, dtype = checkpoint.spec if shard is None else shard.local_spec, sizes.layout.dtype
    weights = choose_weights(config, checkpoint, shard, device, dtype)
    head = choose_head(config, checkpoint, weights, device, dtype)
    matrix_bytes = bytes_of_matrices(weights, checkpoint, shard, device, dtype)
    require_fit(
        checkpoint.source,
        spec,
        sizes,
        config.instance,
        device,
        matrix_bytes=matrix_bytes,
        head_bytes=bytes_of_head(head, checkpoint),
    )
    model = load_decoder(checkpoint, dtype, device, weights=weights, head=head, shard=shard)
    return model, matrix_bytes is not None and weights is Weights.KEPT


def blocks_for_all(
    layout: KVLayout, device: torch.device, group: RankGroup | None, of_steps: int = 0
) -> int:
    """The default number of blocks in the pool: the smallest of all ranks.

    `of_steps`: bytes of a GPU that are left for steps. Raises `ConfigError` if no block fits."""
    own = blocks_in_free_memory(layout, device, 1 if group is None else group.size, of_steps)
    found = own if group is None else group.least(own)
    if not found:
        which = str(device) if not own else "another rank's device"
        raise ConfigError(
            f"the weights and steps leave too little of the memory of {which} for KV; use a "
            "smaller model, a device with more memory, or a lower "
            "`scheduler.max_num_batched_tokens`"
        )
    return found


def host_bytes_for_all(host_kv_gb: float | None, sizes: KvSizes, group: RankGroup | None) -> int:
    """The bytes of the host tier on each rank. Each rank holds its shard of every block."""
    ranks, free = 1, available_memory()
    if group is not None:
        ranks, free = group.size, group.least(free)  # Measured before any rank allocates.
    # Without slots, the memory holds whole blocks.
    unit = sizes.layout.block_bytes if not sizes.num_slots else MIB
    return unit * host_slots(host_kv_gb, ranks * unit, sizes.num_bytes // unit, free)


def _no_report(_: str | None) -> None:
    pass


def _log(runner: "ModelRunner | CudaRunner") -> None:
    info = runner.info
    logger.info(
        "%d KV blocks of %d tokens and %d window slots (%s, %.0f MiB), %d more on the host, "
        "weights %.0f MiB, contexts up to %d tokens",
        info.num_blocks,
        info.block_size,
        0 if info.window is None else info.window.num_slots,
        info.kv_dtype,
        info.cache_mem,
        info.num_host_blocks,
        info.model_mem,
        info.max_seq_len,
    )


def _shared_memory(config: BuiltinConfig, model: Decoder, member: RankMember) -> MemoryLayout:
    """The memory that ranks share for all-reduces of hidden states."""
    row_bytes = model.spec.hidden_size * model.dtype.itemsize
    return MemoryLayout.of(member.group.size, row_bytes, config.scheduler.max_num_batched_tokens)


def rank_device(config: BuiltinConfig, member: RankMember | None) -> torch.device:
    """The device of a rank: rank r uses device `first + r`. Makes it this thread's CUDA device."""
    device = resolve_device(config.device)
    if device.type == "cpu":
        return device
    first, size, rank = device.index or 0, 1, 0
    if member is not None:
        size, rank = member.group.size, member.group.rank
    if first + size > torch.cuda.device_count():
        raise ConfigError(
            f"`device` and `instance.tensor_parallel` need {size} CUDA devices, starting "
            f"at cuda:{first}, but torch sees only {torch.cuda.device_count()}"
        )
    device = torch.device("cuda", first + rank)
    torch.cuda.set_device(device)  # Events are recorded on the current device's stream.
    return device


def _shard(checkpoint: Checkpoint, member: RankMember | None) -> Partition | None:
    if member is None:
        return None
    require_divisible(checkpoint.spec, member.group.size, checkpoint.source)
    return Partition(checkpoint.spec, member.group)


def _use_triton(instance: BuiltinInstance, spec: DecoderSpec, device: torch.device) -> bool:
    """Whether the Triton kernels can run this model.

    Raises `ConfigError` if they cannot and the config requires them."""
    if instance.attn_func == "torch":
        return False
    size = instance.block_size or _KERNEL_BLOCK_SIZE
    reasons = []
    if find_spec("triton") is None:
        reasons.append("triton is not installed")
    quantised = instance.kv_cache_dtype == "fp8"
    # The kernels read two e4m3 codes as one 16-bit number.
    least = _MIN_HEAD_DIM * (2 if quantised else 1)
    head_dim = spec.attention.head_dim
    if not least <= head_dim <= _MAX_HEAD_DIM or not _is_power_of_two(head_dim):
        reasons.append(f"the kernels do not support heads of size {head_dim}")
    if len(spec.layer_groups()) > 1:
        reasons.append("the kernels need heads of the same shape in all layers")
    if size < _BLOCK_SIZE or not _is_power_of_two(size):
        reasons.append(f"`instance.block_size` {size} is not a power of two of 16 or more")
    if quantised and torch.cuda.get_device_capability(device) < E4M3:
        reasons.append("`instance.kv_cache_dtype` fp8 needs compute capability 8.9 or later")
    if reasons and instance.attn_func == "triton":
        raise ConfigError(f"`instance.attn_func`: triton cannot be used: {'; '.join(reasons)}")
    if reasons:
        logger.warning("attention runs without Triton, slowly: %s", "; ".join(reasons))
    return not reasons


def _is_power_of_two(number: int) -> bool:
    return number.bit_count() == 1


def _warm_cuda_runner(
    config: BuiltinConfig,
    model: Decoder,
    sizes: KvSizes,
    unit: Unit | None,
    report: Callable[[str | None], None],
) -> "CudaRunner":
    """Raises `ConfigError` if KV leaves too little memory for steps."""
    try:
        runner = _make_cuda_runner(config, model, sizes, unit)
        runner.warm_up(report)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{sizes.num_blocks} KV blocks leave too little of the memory of {model.device} for "
            "steps; set `instance.num_kv_cache_blocks` to a smaller number, or lower "
            "`scheduler.max_num_batched_tokens` or `scheduler.max_batch_size`"
        ) from error
    return runner


def _make_cuda_runner(
    config: BuiltinConfig,
    model: Decoder,
    sizes: KvSizes,
    unit: Unit | None,
) -> "CudaRunner":
    from parrot.engine.runner.cuda import CudaOptions, CudaRunner  # Imports Triton.

    limits = config.scheduler
    options = CudaOptions(
        max_rows=min(limits.max_batch_size, limits.max_num_batched_tokens),
        max_tokens=limits.max_num_batched_tokens,
        max_seq_len=config.instance.max_seq_len,
        gate=GateConfig() if config.instance.shared_prefix else None,
        quantised=config.instance.kv_cache_dtype == "fp8",
        num_host_blocks=sizes.num_host_blocks,
        num_slots=sizes.num_slots,
        num_host_slots=sizes.num_host_slots,
    )
    return CudaRunner(model, sizes.num_blocks, sizes.layout.block_size, options, unit)


def _make_torch_runner(
    config: BuiltinConfig,
    model: Decoder,
    sizes: KvSizes,
    unit: Unit | None,
    *,
    is_alone: bool,
) -> ModelRunner:
    """`is_alone`: there is one rank."""
    instance, layout = config.instance, sizes.layout
    is_alone_on_cpu = is_alone and model.device.type == "cpu"
    make_layers = None
    if is_alone_on_cpu and instance.attn_func == "auto":
        make_layers = _compiled_layers(layout.dtype_name)
    adapts = is_alone_on_cpu and not instance.num_threads
    options = CpuOptions(
        max_rows=config.scheduler.max_batch_size,
        max_seq_len=instance.max_seq_len,
        gate=cpu_gate(model.dtype) if instance.shared_prefix else None,
        quantised=layout.quantised,
        num_host_blocks=sizes.num_host_blocks,
        num_slots=sizes.num_slots,
        num_host_slots=sizes.num_host_slots,
        max_threads=torch.get_num_threads() if adapts else None,
    )
    return ModelRunner(
        model,
        sizes.num_blocks,
        layout.block_size,
        options,
        unit=unit,
        make_layers=make_layers,
    )


def _compiled_layers(dtype_name: str) -> MakeLayers | None:
    """Layers with kernels that are compiled for this CPU; None if `dtype_name` has none."""
    from parrot.engine.cpu.forward import CompiledLayers
    from parrot.engine.cpu.native import start_loading

    kernels = start_loading(dtype_name)
    return None if kernels is None else partial(CompiledLayers, kernels)


def _default_threads(num_ranks: int) -> int:
    """One thread per physical core that this process may use, divided among the ranks.

    Decoding is bound by memory bandwidth, so a second thread per core does not help."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    capabilities: dict[str, int] = getattr(torch.cpu, "get_capabilities", dict)()
    num_cores = min(usable or 1, capabilities.get("num_physical_cores") or usable or 1)
    return max(1, num_cores // num_ranks)
