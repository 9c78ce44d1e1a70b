"""Compile kernels for sm_90 without a GPU and report the resources that ptxas assigned, as JSON
lines.

Run this module as a program, in a process without TRITON_INTERPRET. It prints one line for each
variant: registers, spilled bytes, shared memory, and whether the kernel uses the warp-group matrix
instruction."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compile_kernel(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    *,
    divisible: tuple[str, ...],
    num_warps: int,
    num_stages: int = 3,
    max_registers: int | None = None,
) -> dict[str, Any]:
    """`types` maps run-time arguments to Triton types. `divisible` names the arguments that are
    multiples of 16 (aligned pointers and strides)."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    # Sort the attributes: their text is a part of the key in Triton's cache of compiled kernels.
    indices = sorted(map(names.index, divisible))
    attributes = {(index,): [["tt.divisibility", 16]] for index in indices}
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    compiled = triton.compile(
        source(kernel, signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, "maxnreg": max_registers},
    )
    return {
        **_resources(compiled.asm["cubin"]),
        "shared": compiled.metadata.shared,
        "wgmma": "wgmma.mma_async" in compiled.asm["ptx"],
    }


def _resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(NVIDIA_TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"]}


ATTENTION_POINTERS = {
    "q_ptr": "*bf16",
    "tables": "*i32",
    "positions": "*i32",
    "token_order": "*i32",
    "items": "*i32",
    "slot_of": "*i32",
    "out_ptr": "*bf16",
    "partial_out": "*fp32",
    "partial_lse": "*fp32",
}


def attention_variant(
    rows: int,
    *,
    tiles: bool = False,
    own: bool = False,
    keys: int = 64,
    warps: int = 4,
    stages: int = 3,
    page: int = 64,
    group: int = 4,
    dim: int = 128,
    all_masked: bool | None = None,
    early: bool = False,
    max_registers: int | None = None,
    quantised: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> dict[str, Any]:
    from parrot.engine.kernels.attention_kernels import attend_items
    from parrot.engine.kernels.quantised_kernels import attend_quantised_items
    from parrot.engine.kernels.tile_kernels import attend_tiles

    pointers = dict(ATTENTION_POINTERS)
    exponents = ("k_exponents_ptr", "v_exponents_ptr")
    if quantised:
        pointers |= dict.fromkeys(exponents, "*u8")
    types = {"scale_log2": "fp32", "stride_q": "i32", "stride_table": "i32"}
    divisible = {*pointers, "stride_q"}
    constants = {
        "G": group,
        "H": 8 * group,
        "D": dim,
        "PAGE": page,
        "BM": rows,
        "BN": keys,
        "STAGES": stages,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "UPCAST": False,
    }
    if tiles:
        kind = "u8" if quantised else "bf16"
        types |= dict.fromkeys(("k_rows", "v_rows"), f"tensordesc<{kind}[{keys},{dim}]>")
        constants |= {"OWN": own, "QUANTISED": quantised}
        if not quantised:
            constants |= dict.fromkeys(exponents)
    elif quantised:
        pointers |= {"k_ptr": "*i16", "v_ptr": "*i16"}
        divisible |= {"k_ptr", "v_ptr"}
        constants["DEPENDENT"] = True
    else:
        pointers |= {"k_ptr": "*bf16", "v_ptr": "*bf16"}
        types["stride_page"] = "i32"
        divisible |= {"k_ptr", "v_ptr", "stride_page"}
        constants |= {
            "STRIDE_HEAD": page * dim,
            "STRIDE_TOKEN": dim,
            "ALL_MASKED": rows == 16 if all_masked is None else all_masked,
            "EARLY": early,
            "DEPENDENT": True,
        }
    items = attend_quantised_items if quantised else attend_items
    return compile_kernel(
        attend_tiles if tiles else items,
        {**pointers, **types},
        constants,
        divisible=tuple(divisible),
        num_warps=warps,
        num_stages=stages,
        max_registers=max_registers,
    )


def convert_variant() -> dict[str, Any]:
    from parrot.engine.kernels.quantised_kernels import convert_pages_kernel

    pointers = dict.fromkeys(("k_ptr", "v_ptr", "k_exponents", "v_exponents"), "*u8")
    pointers |= {"pages": "*i32", "k_out": "*bf16", "v_out": "*bf16"}
    return compile_kernel(
        convert_pages_kernel,
        pointers,
        {"ROWS": 512, "D": 128, "BLOCK": 32},
        divisible=tuple(pointers),
        num_warps=4,
    )


def merge_variant(
    *, dim: int = 128, slots: int = 8, heads: int = 1, early: bool = False, warps: int = 1
) -> dict[str, Any]:
    from parrot.engine.kernels.attention_kernels import merge_partials

    pointers = {
        "partial_out": "*fp32",
        "partial_lse": "*fp32",
        "slot_indptr": "*i32",
        "out_ptr": "*bf16",
    }
    return compile_kernel(
        merge_partials,
        pointers,
        {"H": 32, "D": dim, "SLOTS": slots, "HEADS": heads, "EARLY": early, "DEPENDENT": True},
        divisible=tuple(pointers),
        num_warps=warps,
    )


def norm_variant(
    *,
    size: int = 4096,
    warps: int = 4,
    gain: str = "*bf16",
    parts: int = 1,
    codes: bool = False,
    factors: bool = False,
) -> dict[str, Any]:
    from parrot.engine.kernels.fused_kernels import add_rms_norm_kernel

    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr"), "*bf16")
    pointers["weight_ptr"] = gain
    if parts > 1:
        pointers |= {"x_ptr": "*fp32", "powers_ptr": "*i32"}
    if codes:
        pointers |= {"out_ptr": "*fp8e4nv", "powers_ptr": "*fp32"}
    constants = {} if parts > 1 or codes else {"powers_ptr": None}
    constants |= {"PARTS": parts, "CODES": codes, "DEPENDENT": parts > 1}
    pointers, constants = with_factors(
        pointers, constants, "x_powers_ptr", "x_scales_ptr", factors=factors
    )
    if factors:
        pointers["x_ptr"] = "*fp32"
    return compile_kernel(
        add_rms_norm_kernel,
        {**pointers, "eps": "fp32", "stride_x": "i32", "stride_part": "i32"},
        {"SIZE": size, "BLOCK": triton.next_power_of_2(size), "ADD": True, **constants},
        divisible=(*pointers, "stride_x", "stride_part"),
        num_warps=warps,
    )


def add_parts_variant() -> dict[str, Any]:
    from parrot.engine.kernels.fused_kernels import add_parts_kernel

    pointers = dict.fromkeys(("residual_ptr", "weight_ptr", "out_ptr"), "*bf16")
    pointers |= dict.fromkeys(("parts_ptr", "squares_ptr"), "*fp32")
    return compile_kernel(
        add_parts_kernel,
        {**pointers, "stride_part": "i32"},
        {"SIZE": 4096, "BLOCK": 512, "PARTS": 8, "DEPENDENT": True},
        divisible=(*pointers, "stride_part"),
        num_warps=4,
    )


def rope_variant(
    *,
    with_norm: bool = False,
    keep_k: bool = False,
    quantised: bool = False,
    early: bool = False,
    dim: int = 128,
    gain: str = "*bf16",
    warps: int = 2,
    factors: bool = False,
    parts: int = 0,
) -> dict[str, Any]:
    from parrot.engine.kernels.fused_kernels import rope_and_store_kernel

    pointers = {
        "qkv_ptr": "*fp32" if parts else "*bf16",
        "out_ptr": "*bf16",
        "positions": "*i32",
        "table_rows": "*i32",
        "tables": "*i32",
        "cos_sin": "*fp32",
        "k_cache": "*bf16",
        "v_cache": "*bf16",
    }
    constants = {"H": 32, "HKV": 8, "D": dim, "PAGE": 64, "HEADS": 2 if parts else 8}
    constants |= {"PARTS": parts, "WITH_NORM": with_norm, "KEEP_K": keep_k, "DEPENDENT": True}
    constants |= {"QUANTISED": quantised, "EARLY": early}
    exponents = ("k_exponents", "v_exponents")
    if quantised:
        pointers |= dict.fromkeys(("k_cache", "v_cache", *exponents), "*u8")
    else:
        constants |= dict.fromkeys(exponents)
    if with_norm:
        pointers |= {"q_weight": gain, "k_weight": gain}
    else:
        constants |= {"q_weight": None, "k_weight": None}
    pointers, constants = with_factors(
        pointers, constants, "powers_ptr", "scales_ptr", factors=factors
    )
    names = "stride_qkv", "stride_part", "stride_out", "stride_page", "stride_table"
    strides = dict.fromkeys(names, "i32")
    return compile_kernel(
        rope_and_store_kernel,
        {**pointers, "eps": "fp32", **strides},
        constants,
        divisible=(*pointers, "stride_qkv", "stride_part", "stride_out", "stride_page"),
        num_warps=warps,
    )


def block_copy_variant(*, gather: bool, words: int = 16384) -> dict[str, Any]:
    from parrot.engine.kernels.block_copy_kernels import block_copy_kernel

    pointers = {"pool": "*i64", "pieces": "*i64", "blocks": "*i32"}
    strides = {"pool_row_stride": "i32", "piece_stride": "i32"}
    return compile_kernel(
        block_copy_kernel,
        pointers | strides,
        {"WORDS": words, "CHUNK": min(1024, words), "GATHER": gather},
        divisible=("pool", "pieces", "pool_row_stride", "piece_stride"),
        num_warps=4,
    )


def silu_variant(
    *,
    size: int = 14336,
    gelu: bool = False,
    codes: bool = False,
    factors: bool = False,
) -> dict[str, Any]:
    from parrot.engine.kernels.fused import silu_tile
    from parrot.engine.kernels.fused_kernels import silu_mul_kernel

    pointers = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16"}
    if codes:
        pointers |= {"out_ptr": "*fp8e4nv", "powers_ptr": "*fp32"}
    constants = {"GELU": gelu, "CODES": codes} | ({} if codes else {"powers_ptr": None})
    pointers, constants = with_factors(
        pointers, constants, "x_powers_ptr", "x_scales_ptr", factors=factors
    )
    tile = silu_tile(size, codes=codes, has_factors=factors)
    return compile_kernel(
        silu_mul_kernel,
        pointers,
        {"SIZE": size, "BLOCK": tile["BLOCK"], **constants},
        divisible=tuple(pointers),
        num_warps=tile["num_warps"],
        max_registers=tile.get("maxnreg"),
    )


def linear_variant(
    *,
    rows: int = 32,
    outputs: int = 64,
    columns: int = 128,
    silu: bool = False,
    add: bool = False,
    e4m3: bool = False,
    blocked: bool = False,
    stages: int = 4,
    warps: int = 4,
) -> dict[str, Any]:
    from parrot.engine.kernels.linear.matrix_kernels import few_rows_linear_kernel

    pointers = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16"}
    constants: dict[str, Any] = {"bias_ptr": None, "BIAS": False, "SILU": silu, "ADD": add}
    pointers, constants = with_codes(pointers, constants, e4m3=e4m3)
    added = {"residual_ptr": "*bf16", "gain_ptr": "*bf16", "squares_out_ptr": "*fp32"}
    if add:
        pointers |= added
        constants |= {"squares_ptr": None, "PARTS": 0}
    else:
        pointers["squares_ptr"] = "*fp32"
        constants |= {**dict.fromkeys(added), "PARTS": 80}
    constants |= {"N": 5120, "K": 5120, "BLOCKED": blocked}
    constants |= {"BM": rows, "BN": outputs, "BK": columns, "STAGES": stages, "SPLIT": 5120}
    return compile_kernel(
        few_rows_linear_kernel,
        {**pointers, "eps": "fp32", "num_rows": "i32", "stride_x": "i32"},
        {**constants, "DEPENDENT": True},
        divisible=(*pointers, "stride_x"),
        num_warps=warps,
    )


def with_codes(
    pointers: dict[str, str], constants: dict[str, Any], *, e4m3: bool, is_coded: bool = True
) -> tuple[dict[str, str], dict[str, Any]]:
    """The arguments of products, for weights in bfloat16 or in e4m3.

    `is_coded`: x is in e4m3 like the weights."""
    if not e4m3:
        return pointers, constants | {"scales_ptr": None, "powers_ptr": None, "E4M3": False}
    pointers |= {"weight_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}
    if is_coded:
        pointers |= {"x_ptr": "*fp8e4nv", "powers_ptr": "*fp32"}
    else:
        constants |= {"powers_ptr": None}
    return pointers, constants | {"E4M3": True}


def with_factors(
    pointers: dict[str, str], constants: dict[str, Any], *names: str, factors: bool
) -> tuple[dict[str, str], dict[str, Any]]:
    """The arguments of kernels that read a product, with or without its factors `names`."""
    if factors:
        return pointers | dict.fromkeys(names, "*fp32"), constants | {"FACTORS": True}
    return pointers, constants | dict.fromkeys(names) | {"FACTORS": False}


def codes_of(bits: int, group: int, *, least: bool) -> dict[str, Any]:
    """The arguments of kernels for codes, with 4096 inputs."""
    blocks = 4096 // (16 // bits * min(32, group))
    shift = 10 if least or group == 16 else 0
    found = {"BITS": bits, "GROUP": group, "LEAST": least, "SHIFT": shift}
    return {**found, "BLOCKS": blocks, "HALF": True}


def words_variant(
    *,
    rows: int = 16,
    outputs: int = 128,
    slices: int = 1,
    stages: int = 3,
    bits: int = 4,
    group: int = 128,
    least: bool = False,
    silu: bool = False,
    add: bool = False,
    warps: int = 4,
) -> dict[str, Any]:
    from parrot.engine.kernels.linear.words_kernels import words_linear_kernel

    pointers = {"x_ptr": "*bf16", "words_ptr": "*i16", "factors_ptr": "*i32", "out_ptr": "*bf16"}
    constants: dict[str, Any] = {"bias_ptr": None, "squares_ptr": None, "BIAS": False, "PARTS": 0}
    added = {"residual_ptr": "*bf16", "gain_ptr": "*bf16", "squares_out_ptr": "*fp32"}
    if add:
        pointers |= added
    else:
        constants |= dict.fromkeys(added)
    constants |= {"N": 14336, "K": 4096, "BM": rows, "BN": outputs}
    constants |= {"STAGES": stages, "SLICES": slices, **codes_of(bits, group, least=least)}
    return compile_kernel(
        words_linear_kernel,
        {**pointers, "eps": "fp32", "num_rows": "i32", "stride_x": "i32"},
        {**constants, "SILU": silu, "ADD": add, "ASSEMBLY": True, "DEPENDENT": True},
        divisible=(*pointers, "stride_x"),
        num_warps=warps,
    )


def words_qkv_variant(
    *,
    rows: int = 8,
    outputs: int = 32,
    bits: int = 4,
    group: int = 128,
    least: bool = False,
    warps: int = 8,
) -> dict[str, Any]:
    from parrot.engine.kernels.linear.words_kernels import words_qkv_kernel

    pointers = {"x_ptr": "*bf16", "words_ptr": "*i16", "factors_ptr": "*i32", "q_ptr": "*bf16"}
    pointers |= dict.fromkeys(("positions", "table_rows", "tables"), "*i32")
    pointers |= {"cos_sin": "*fp32", "k_cache": "*bf16", "v_cache": "*bf16", "squares_ptr": "*fp32"}
    numbers = dict.fromkeys(("num_rows", "stride_x", "stride_page", "stride_table"), "i32")
    constants: dict[str, Any] = {"bias_ptr": None, "BIAS": False, "PARTS": 64, "K": 4096}
    constants |= {"H": 32, "HKV": 8, "D": 128, "PAGE": 64, "BM": rows, "BN": outputs}
    constants |= {"STAGES": 3, "SLICES": 8, **codes_of(bits, group, least=least)}
    return compile_kernel(
        words_qkv_kernel,
        {**pointers, **numbers, "eps": "fp32"},
        {**constants, "ASSEMBLY": True, "DEPENDENT": True},
        divisible=(*pointers, "stride_x", "stride_page"),
        num_warps=warps,
    )


def warp_groups_variant(
    *, rows: int = 64, silu: bool = False, bias: bool = False, parts: int = 0
) -> dict[str, Any]:
    from parrot.engine.kernels.linear import warp_group_kernels as kernels
    from parrot.engine.kernels.linear.chain_tiles import COPIED_FACTORS, COPIED_WORDS
    from parrot.engine.kernels.linear.warp_groups import MAX_REGISTERS

    descriptors = {
        "x": f"tensordesc<bf16[{rows}, 128],{kernels.COPIED_X.value!r}>",
        "words": f"tensordesc<i16[1, 16, 2, 8, 32],{COPIED_WORDS.value!r}>",
        "factors": f"tensordesc<i32[1, 16, 2, 8],{COPIED_FACTORS.value!r}>",
    }
    pointers = {"out_ptr": "*bf16" if silu else "*fp32"}
    constants: dict[str, Any] = {"N": 14336 if silu else 4096, "K": 4096, "BLOCKS": 32}
    constants |= {"ROWS": rows, "SILU": silu, "PARTS": parts}
    constants |= {"STAGES": 6 if silu else 4, "HALF": True, "SHIFT": 0}
    if bias:
        pointers["bias_ptr"] = "*bf16"
    else:
        constants["bias_ptr"] = None
    if parts:
        pointers["squares_ptr"] = "*fp32"
    else:
        constants["squares_ptr"] = None
    return compile_kernel(
        kernels.warp_group_kernel,
        {**pointers, **descriptors, "eps": "fp32", "num_rows": "i32", "split_blocks": "i32"},
        constants,
        divisible=tuple(pointers),
        num_warps=4,
        max_registers=MAX_REGISTERS,
    )


def words_numbers_variant(
    *, bits: int = 4, group: int = 128, least: bool = False
) -> dict[str, Any]:
    from parrot.engine.kernels.linear.words_kernels import words_numbers_kernel

    pointers = {"words_ptr": "*i16", "factors_ptr": "*i32", "out_ptr": "*bf16"}
    constants = codes_of(bits, group, least=least)
    del constants["BLOCKS"]
    return compile_kernel(
        words_numbers_kernel,
        pointers,
        {"N": 28672, "K": 4096, "BN": 64, **constants},
        divisible=tuple(pointers),
        num_warps=4,
    )


def sum_few_variant(*, kind: str = "bf16", splits: int = 2, warps: int = 8) -> dict[str, Any]:
    from parrot.engine.kernels.ranks.kernels import sum_few_and_norm_kernel

    addresses = dict.fromkeys(("addresses", "turns"), "*i64")
    words = dict.fromkeys(("parts_ptr", "residual_ptr", "weight_ptr", "out_ptr"), "*i32")
    constants = {
        "RANK": 1,
        "SIZE": 2,
        "EVERY": 64,
        "ROWS": 64,
        "SPLITS": splits,
        "WORDS": 2048,
        "BLOCK": 2048,
    }
    constants |= {"KIND": triton.language.dtype(kind), "ADD": True, "DEPENDENT": True}
    return compile_kernel(
        sum_few_and_norm_kernel,
        {**addresses, **words, "place": "i32", "eps": "fp32", "num_rows": "i32"},
        constants,
        divisible=(*addresses, *words, "place"),
        num_warps=warps,
    )


def sum_variant(*, warps: int = 8) -> dict[str, Any]:
    from parrot.engine.kernels.ranks.kernels import sum_and_norm_kernel

    addresses = dict.fromkeys(("addresses", "turns"), "*i64")
    pointers = dict.fromkeys(("residual_ptr", "weight_ptr", "out_ptr"), "*bf16")
    numbers = dict.fromkeys(("flags_place", "place", "num_rows"), "i32")
    shape = {"FLAGS": 1024, "WIDTH": 4096, "BLOCK": 4096, "ADD": True}
    return compile_kernel(
        sum_and_norm_kernel,
        {**addresses, **pointers, **numbers, "eps": "fp32"},
        {"RANK": 0, "SIZE": 4, "EVERY": 64, **shape},
        divisible=(*addresses, *pointers, "place"),
        num_warps=warps,
    )


def exchange_variant(*, only_first: bool = False, warps: int = 8) -> dict[str, Any]:
    from parrot.engine.kernels.ranks.kernels import exchange_kernel

    addresses = dict.fromkeys(("addresses", "turns"), "*i64")
    pointers = dict.fromkeys(("x_ptr", "out_ptr"), "*i32")
    numbers = dict.fromkeys(("flags_place", "place", "inbox", "count", "width"), "i32")
    return compile_kernel(
        exchange_kernel,
        {**addresses, **pointers, **numbers},
        {"RANK": 1, "SIZE": 2, "EVERY": 64, "FLAGS": 1024, "BLOCK": 1024, "ONLY_FIRST": only_first},
        divisible=(*addresses, *pointers),
        num_warps=warps,
    )


def row_variant(
    *,
    num_out: int = 4096,
    size: int = 4096,
    outputs: int = 4,
    silu: bool = False,
    rows: int = 1,
    e4m3: bool = False,
    warps: int = 8,
) -> dict[str, Any]:
    from parrot.engine.kernels.linear.row_kernels import row_linear_kernel

    pointers = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16", "squares_ptr": "*fp32"}
    constants: dict[str, Any] = dict.fromkeys(
        ("bias_ptr", "residual_ptr", "gain_ptr", "squares_out_ptr")
    )
    constants |= {"N": num_out, "K": size, "ROWS": rows, "BN": outputs, "BIAS": False, "ADD": False}
    constants |= {"BK": triton.next_power_of_2(size), "PARTS": 128, "SILU": silu, "DEPENDENT": True}
    pointers, constants = with_codes(pointers, constants, e4m3=e4m3, is_coded=False)
    return compile_kernel(
        row_linear_kernel,
        {**pointers, "eps": "fp32", "num_rows": "i32", "stride_x": "i32"},
        constants,
        divisible=(*pointers, "stride_x"),
        num_warps=warps,
    )


def chain_variant(
    *,
    words: bool = False,
    hidden: int = 4096,
    inner: int = 14336,
    tiles: tuple[int, int, int, int] = (2, 16, 4, 4),
    last: bool = False,
    bias: bool = False,
) -> dict[str, Any]:
    """`tiles`: the room for a program's tiles of 132 programs, in `chain_kernel`'s order."""
    from parrot.engine.kernels.linear import chain_tiles
    from parrot.engine.kernels.linear.chain import MAX_REGISTERS
    from parrot.engine.kernels.linear.chain_kernels import chain_kernel

    tile, layout = "fp8e4nv[8, 1, 2, 8, 128]", chain_tiles.COPIED_CODES
    if words:
        tile, layout = "i16[16, 1, 2, 8, 32]", chain_tiles.COPIED_WORDS
    values = ("attended", "residual", "gain", "next_gain", "rows", "inner", "q")
    pointers = {f"{name}_ptr": "*bf16" for name in values}
    pointers |= dict.fromkeys(("k_cache", "v_cache"), "*bf16")
    weights = ("out", "gate_up", "down", "qkv")
    descriptors = {f"{name}_weight": f"tensordesc<{tile},{layout.value!r}>" for name in weights}
    constants: dict[str, Any] = {} if bias else {"qkv_bias_ptr": None}
    if words:
        constants |= {f"{name}_scales_ptr": None for name in weights}
        factors = f"tensordesc<i32[32, 1, 2, 8],{chain_tiles.COPIED_FACTORS.value!r}>"
        descriptors |= {f"{name}_factors": factors for name in weights}
    else:
        pointers |= {f"{name}_scales_ptr": "*fp32" for name in weights}
        constants |= {f"{name}_factors": None for name in weights}
    pointers |= dict.fromkeys(("squares_ptr", "cos_sin"), "*fp32")
    pointers |= dict.fromkeys(("positions", "table_rows", "tables", "counters"), "*i32")
    if bias:
        pointers["qkv_bias_ptr"] = "*bf16"
    numbers = {"eps": "fp32", "next_eps": "fp32", "stride_page": "i32", "stride_table": "i32"}
    room = dict(zip(("T_HIDDEN", "T_EARLY", "T_LATE", "T_QKV"), tiles, strict=True))
    shape = {"HIDDEN": hidden, "HEADS": hidden, "INNER": inner, "H": 32, "HKV": 8, "D": 128}
    return compile_kernel(
        chain_kernel,
        {**pointers, **descriptors, **numbers},
        {**constants, **shape, **room, "PAGE": 64, "HAS_QKV": not last, "BIAS": bias}
        | {
            "WORDS": words,
            "HALF_SCALES": True,
            "STAGES": 4 if words else 5,
            "AHEAD": 3,
            "AHEAD_WAITING": 2,
            "NUM": 132,
        },
        divisible=(*pointers, "stride_page"),
        num_warps=8,
        max_registers=MAX_REGISTERS,
    )


def codes_variant(*, size: int = 14336, warps: int = 8) -> dict[str, Any]:
    from parrot.engine.kernels.row_codes import row_codes_kernel

    pointers = {"x_ptr": "*bf16", "codes_ptr": "*fp8e4nv", "powers_ptr": "*fp32"}
    return compile_kernel(
        row_codes_kernel,
        {**pointers, "stride_x": "i32"},
        {"SIZE": size, "BLOCK": triton.next_power_of_2(size), "DEPENDENT": True},
        divisible=(*pointers, "stride_x"),
        num_warps=warps,
    )


def qkv_variant(
    *, rows: int = 32, outputs: int = 64, warps: int = 4, matrix: bool = True, e4m3: bool = False
) -> dict[str, Any]:
    from parrot.engine.kernels.linear.matrix_kernels import few_rows_qkv_kernel
    from parrot.engine.kernels.linear.row_kernels import row_qkv_kernel

    values = ("x_ptr", "weight_ptr", "q_ptr", "k_cache", "v_cache")
    pointers = {
        **dict.fromkeys(values, "*bf16"),
        **dict.fromkeys(("positions", "table_rows", "tables"), "*i32"),
        **dict.fromkeys(("cos_sin", "squares_ptr"), "*fp32"),
    }
    numbers = dict.fromkeys(("num_rows", "stride_x", "stride_page", "stride_table"), "i32")
    shape = {"K": 4096, "H": 32, "HKV": 8, "D": 128, "PAGE": 64, "PARTS": 80}
    tile = {"BM": rows, "BK": 128, "STAGES": 4} if matrix else {"ROWS": rows, "BK": 4096}
    constants = {**shape, **tile, "BN": outputs, "bias_ptr": None, "BIAS": False, "DEPENDENT": True}
    pointers, constants = with_codes(pointers, constants, e4m3=e4m3, is_coded=matrix)
    return compile_kernel(
        few_rows_qkv_kernel if matrix else row_qkv_kernel,
        {**pointers, **numbers, "eps": "fp32"},
        constants,
        divisible=(*pointers, "stride_x", "stride_page"),
        num_warps=warps,
    )


def best_variant(*, warps: int = 4) -> dict[str, Any]:
    from parrot.engine.kernels.sampling_kernels import best_of_chunks_kernel

    pointers = {"logits": "*bf16", "scores": "*fp32", "tokens": "*i32"}
    return compile_kernel(
        best_of_chunks_kernel,
        {**pointers, "stride": "i32", "vocab_size": "i32", "first_token": "i32"},
        {"BLOCK": 4096},
        divisible=(*pointers, "stride", "vocab_size", "first_token"),
        num_warps=warps,
    )


def early_variant(*, dim: int = 128) -> dict[str, Any]:
    from parrot.engine.kernels.early_kernels import COPIED, MAX_REGISTERS, attend_early

    pointers = {
        **dict.fromkeys(("q_ptr", "out_ptr"), "*bf16"),
        **dict.fromkeys(("tables", "positions", "items", "slot_of"), "*i32"),
        **dict.fromkeys(("partial_out", "partial_lse"), "*fp32"),
    }
    rows = f"tensordesc<bf16[64, {dim}],{COPIED.value!r}>"
    return compile_kernel(
        attend_early,
        {**pointers, "keys": rows, "values": rows, "scale_log2": "fp32", "stride_table": "i32"},
        {"G": 4, "H": 32, "D": dim, "PAGE": 64, "EARLY": True},
        divisible=tuple(pointers),
        num_warps=4,
        max_registers=MAX_REGISTERS,
    )


def copy_variant() -> dict[str, Any]:
    from parrot.engine.kernels.small_copies import copy_numbers_kernel

    pointers = dict.fromkeys(("source", "target", "known"), "*i32")
    return compile_kernel(
        copy_numbers_kernel,
        {**pointers, "count": "i32", "num_tokens": "i32"},
        {"BLOCK": 1024, "HAS_KNOWN": True},
        divisible=(),
        num_warps=4,
    )


def noise_variant(*, limited: bool = True, warps: int = 8) -> dict[str, Any]:
    from parrot.engine.kernels.sampling_kernels import noisy_best_of_chunks_kernel

    pointers = {
        "logits": "*bf16",
        "best_tokens": "*i32",
        "settings": "*i32",
        "settings_f": "*fp32",
        "floors": "*fp32",
        "scores": "*fp32",
        "tokens": "*i32",
    }
    return compile_kernel(
        noisy_best_of_chunks_kernel,
        {**pointers, "stride": "i32", "vocab_size": "i32"},
        {"LIMITED": limited, "BLOCK": 4096},
        divisible=(*pointers, "stride", "vocab_size"),
        num_warps=warps,
    )


def floors_variant(*, warps: int = 32) -> dict[str, Any]:
    from parrot.engine.kernels.sampling_kernels import find_floors_kernel

    pointers = {
        "logits": "*bf16",
        "best_tokens": "*i32",
        "settings": "*i32",
        "settings_f": "*fp32",
        "floors": "*fp32",
    }
    return compile_kernel(
        find_floors_kernel,
        {**pointers, "stride": "i32", "vocab_size": "i32"},
        {"BLOCK": 8192},
        divisible=(*pointers, "stride", "vocab_size"),
        num_warps=warps,
    )


def adjust_variant(*, warps: int = 4) -> dict[str, Any]:
    from parrot.engine.kernels.sampling_kernels import adjust_logits_kernel

    pointers = {
        **dict.fromkeys(("logits", "rows_f", "entries_f"), "*fp32"),
        **dict.fromkeys(("token_ids", "rows", "entries"), "*i32"),
    }
    return compile_kernel(
        adjust_logits_kernel,
        {**pointers, "stride": "i32", "vocab_size": "i32"},
        {"BLOCK": 1024},
        divisible=(*pointers, "stride", "vocab_size"),
        num_warps=warps,
    )


def mask_variant(*, warps: int = 4) -> dict[str, Any]:
    from parrot.engine.kernels.sampling_kernels import mask_logits_kernel

    pointers = {"logits": "*fp32", "rows": "*i32", "words": "*i32"}
    return compile_kernel(
        mask_logits_kernel,
        {**pointers, "stride": "i32", "num_words": "i32", "vocab_size": "i32"},
        {"BLOCK": 4096},
        divisible=(*pointers, "stride", "vocab_size"),
        num_warps=warps,
    )


VARIANTS = {
    "attention": attention_variant,
    "convert": convert_variant,
    "merge": merge_variant,
    "norm": norm_variant,
    "add parts": add_parts_variant,
    "rope": rope_variant,
    "silu": silu_variant,
    "block copy": block_copy_variant,
    "linear": linear_variant,
    "row": row_variant,
    "chain": chain_variant,
    "copy": copy_variant,
    "early": early_variant,
    "codes": codes_variant,
    "sum few": sum_few_variant,
    "sum": sum_variant,
    "exchange": exchange_variant,
    "qkv": qkv_variant,
    "words": words_variant,
    "words qkv": words_qkv_variant,
    "words numbers": words_numbers_variant,
    "warp groups": warp_groups_variant,
    "best": best_variant,
    "noise": noise_variant,
    "floors": floors_variant,
    "adjust": adjust_variant,
    "mask": mask_variant,
}


def main() -> None:
    """Arguments: JSON objects, each {"kernel": name, ...arguments of its function}."""
    for argument in sys.argv[1:]:
        request = json.loads(argument)
        report = VARIANTS[request.pop("kernel")](**request)
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
