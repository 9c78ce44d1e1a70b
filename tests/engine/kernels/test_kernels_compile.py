"""Kernels compiled for sm_90 without a GPU: registers, spills, shared memory, instructions."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

Reports = dict[str, dict[str, Any]]  # The key is the name of the variant.

MAX_SHARED_BYTES = 227 * 1024
MAX_SPILLED_BYTES = 16  # Triton 3.8 spills four registers of one variant.
QUANTISED = {"kernel": "attention", "quantised": True}
E4M3 = {"e4m3": True}
BLOCKED = {**E4M3, "blocked": True}
TALL = {**E4M3, "rows": 128, "warps": 8}
ROW = {"matrix": False, **E4M3}
SLICED = {"rows": 8, "outputs": 32, "slices": 2, "warps": 2}
EIGHT_SLICES = {"rows": 16, "outputs": 32, "slices": 8, "stages": 4, "warps": 8}
NARROW = {"rows": 64, "outputs": 64, "stages": 4, "group": 32}
LOCAL = {"window": 512, "softcap": 72.1}
FILL = {"tiles": True, "own": True}
LARGE = {"kernel": "attention", "dim": 256, "keys": 32, "warps": 8, **LOCAL}
VARIANTS: dict[str, dict[str, Any]] = {
    "narrow deep": {"kernel": "attention", "rows": 16},
    "narrow deep D64 G3": {"kernel": "attention", "rows": 16, "dim": 64, "group": 3},
    "narrow light": {"kernel": "attention", "rows": 16, "keys": 32, "warps": 2, "stages": 4},
    "narrow, page 16": {"kernel": "attention", "rows": 16, "page": 16},
    "wide, page 16": {"kernel": "attention", "rows": 64, "page": 16},
    "shared": {"kernel": "attention", "rows": 64, "tiles": True},
    "shared G1": {"kernel": "attention", "rows": 64, "tiles": True, "group": 1},
    "shared D64 G3": {"kernel": "attention", "rows": 64, "tiles": True, "dim": 64, "group": 3},
    "fill": {"kernel": "attention", "rows": 64, "tiles": True, "own": True},
    "fill D64 G3": {
        "kernel": "attention",
        "rows": 64,
        "tiles": True,
        "own": True,
        "dim": 64,
        "group": 3,
    },
    "quantised narrow deep": {**QUANTISED, "rows": 16, "max_registers": 128},
    "quantised narrow deep D64 G3": {**QUANTISED, "rows": 16, "dim": 64, "group": 3},
    "quantised narrow, page 16": {**QUANTISED, "rows": 16, "page": 16},
    "shared quantised": {**QUANTISED, "rows": 64, "tiles": True},
    "shared quantised D64 G3": {**QUANTISED, "rows": 64, "tiles": True, "dim": 64, "group": 3},
    "fill quantised": {**QUANTISED, "rows": 64, "tiles": True, "own": True},
    "window, narrow": {"kernel": "attention", "rows": 16, **LOCAL},
    "window, narrow D256": {**LARGE, "rows": 16, "warps": 4},
    "fill with window": {"kernel": "attention", "rows": 64, **FILL, **LOCAL},
    "fill with window D256": {**LARGE, "rows": 64, **FILL},
    "fill with window quantised D256": {**LARGE, **QUANTISED, "rows": 64, **FILL},
    "converted pages": {"kernel": "convert"},
    "merge": {"kernel": "merge"},
    "norm": {"kernel": "norm"},
    "norm with float32 gains": {"kernel": "norm", "gain": "*fp32"},
    "rope with norm D256": {"kernel": "rope", "with_norm": True, "dim": 256, "gain": "*fp32"},
    "merge D256": {"kernel": "merge", "dim": 256},
    "rope": {"kernel": "rope"},
    "rope with norm": {"kernel": "rope", "with_norm": True},
    "quantised rope": {"kernel": "rope", "quantised": True},
    "quantised rope with norm": {"kernel": "rope", "quantised": True, "with_norm": True},
    "quantised rope that keeps": {"kernel": "rope", "quantised": True, "keep_k": True},
    "silu": {"kernel": "silu"},
    "gelu": {"kernel": "silu", "gelu": True},
    "gather": {"kernel": "block copy", "gather": True},
    "scatter": {"kernel": "block copy", "gather": False},
    "scatter of exponents": {"kernel": "block copy", "gather": False, "words": 64},
    "linear": {"kernel": "linear"},
    "linear of 16 rows": {"kernel": "linear", "rows": 16},
    "linear with silu": {"kernel": "linear", "outputs": 128, "silu": True, "stages": 3},
    "linear and residual": {"kernel": "linear", "add": True, "stages": 8},
    "linear of short outputs": {"kernel": "linear", "outputs": 32, "silu": True},
    "linear of 64 rows": {"kernel": "linear", "rows": 64, "outputs": 128, "warps": 8},
    "linear of 64 rows with silu": {"kernel": "linear", "rows": 64, "columns": 64, "silu": True},
    "linear of 64 rows and residual": {"kernel": "linear", "rows": 64, "add": True, "stages": 6},
    "one row": {"kernel": "row"},
    "one row with silu": {"kernel": "row", "num_out": 14336, "outputs": 2, "silu": True},
    "one row of many inputs": {"kernel": "row", "size": 14336, "outputs": 2},
    "linear in e4m3": {"kernel": "linear", "stages": 8, **E4M3},
    "linear in e4m3 with silu": {"kernel": "linear", "stages": 4, "silu": True, **E4M3},
    "linear in e4m3 and residual": {"kernel": "linear", "add": True, "stages": 8, **E4M3},
    "linear in e4m3 of 64 rows": {"kernel": "linear", "rows": 64, "stages": 8, **E4M3},
    "linear in e4m3 of 128 rows": {"kernel": "linear", "stages": 8, **TALL},
    "linear in e4m3 of 128 rows with silu": {"kernel": "linear", "stages": 3, "silu": True, **TALL},
    "qkv in e4m3 of 128 rows": {"kernel": "qkv", **TALL},
    "linear in e4m3 of blocks": {"kernel": "linear", "stages": 8, **BLOCKED},
    "linear in e4m3 of blocks with silu": {"kernel": "linear", "silu": True, **BLOCKED},
    "qkv in e4m3": {"kernel": "qkv", **E4M3},
    "qkv of one row in e4m3": {"kernel": "qkv", "rows": 1, "outputs": 8, "warps": 8, **ROW},
    "narrow before a chain": {"kernel": "attention", "rows": 16, "early": True},
    "one token that copies KV early": {"kernel": "early"},
    "one token of short heads": {"kernel": "early", "dim": 64},
    "merge before a chain": {"kernel": "merge", "early": True},
    "chain": {"kernel": "chain"},
    "chain of words": {"kernel": "chain", "words": True},
    "chain of the last layer": {"kernel": "chain", "last": True},
    "chain of partial chunks": {"kernel": "chain", "inner": 13824, "bias": True},
    "row codes": {"kernel": "codes"},
    "norm of parts": {"kernel": "norm", "parts": 4},
    "norm in e4m3": {"kernel": "norm", "codes": True},
    "norm of a product without factors": {"kernel": "norm", "codes": True, "factors": True},
    "rope of a product without factors": {"kernel": "rope", "factors": True},
    "rope of parts": {"kernel": "rope", "parts": 8, "warps": 1},
    "sum of parts": {"kernel": "add parts"},
    "silu in e4m3": {"kernel": "silu", "codes": True},
    "silu of a product without factors": {"kernel": "silu", "codes": True, "factors": True},
    "merge of several heads": {"kernel": "merge", "heads": 8},
    "one row in e4m3": {"kernel": "row", "outputs": 8, **E4M3},
    "one row in e4m3 with silu": {"kernel": "row", "silu": True, **E4M3},
    "one row in e4m3 of many inputs": {"kernel": "row", "size": 14336, "outputs": 2, **E4M3},
    "four bits": {"kernel": "words", **SLICED},
    "four bits with silu": {"kernel": "words", **SLICED, "silu": True},
    "four bits and residual": {"kernel": "words", **SLICED, "add": True},
    "four bits in groups of 32": {"kernel": "words", **SLICED, "group": 32},
    "four bits of 32 rows": {"kernel": "words", "rows": 32},
    "four bits of 64 rows": {"kernel": "words", "rows": 64},
    "four bits, qkv": {"kernel": "words qkv"},
    "four bits on warp groups": {"kernel": "warp groups"},
    "four bits of 8 rows on warp groups": {"kernel": "warp groups", "rows": 8, "bias": True},
    "four bits with silu on warp groups": {"kernel": "warp groups", "silu": True, "parts": 8},
    "four bits, numbers": {"kernel": "words numbers"},
    "four bits with offsets, 64 rows": {"kernel": "words", **NARROW, "least": True},
    "eight bits": {"kernel": "words", **EIGHT_SLICES, "bits": 8, "group": 32, "silu": True},
    "eight bits in groups of 16, 64 rows": {"kernel": "words", "rows": 64, "bits": 8, "group": 16},
    "eight bits with offsets, qkv": {"kernel": "words qkv", "bits": 8, "group": 16, "least": True},
    "one row of few inputs": {"kernel": "row", "size": 1024, "outputs": 16, "warps": 4},
    "two rows": {"kernel": "row", "size": 1024, "outputs": 16, "rows": 2, "warps": 4},
    "two rows with silu": {
        "kernel": "row",
        "size": 1024,
        "outputs": 8,
        "rows": 2,
        "warps": 4,
        "silu": True,
    },
    "two rows of many inputs": {"kernel": "row", "size": 4096, "outputs": 4, "rows": 2, "warps": 4},
    "qkv of one row": {"kernel": "qkv", "rows": 1, "outputs": 4, "warps": 8, "matrix": False},
    "qkv of two rows": {"kernel": "qkv", "rows": 2, "outputs": 4, "warps": 4, "matrix": False},
    "qkv of 64 rows": {"kernel": "qkv", "rows": 64, "outputs": 128, "warps": 8},
    "qkv": {"kernel": "qkv"},
    "qkv of 16 rows": {"kernel": "qkv", "rows": 16},
    "sum of ranks' few rows": {"kernel": "sum few"},
    "sum of ranks' few rows in float32": {"kernel": "sum few", "kind": "fp32", "splits": 1},
    "sum of ranks' rows": {"kernel": "sum"},
    "exchange": {"kernel": "exchange"},
    "broadcast": {"kernel": "exchange", "only_first": True},
    "best token": {"kernel": "best"},
    "copy and pending tokens": {"kernel": "copy"},
    "noise": {"kernel": "noise", "limited": False},
    "noise above floors": {"kernel": "noise"},
    "floors": {"kernel": "floors"},
    "penalties": {"kernel": "adjust"},
    "masks": {"kernel": "mask"},
}


@pytest.fixture(scope="module")
def reports() -> Reports:
    """Reports of all variants. They come from another process, because kernels in this process may
    be interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_sm90.py")
    command = [sys.executable, str(script), *map(json.dumps, VARIANTS.values())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(VARIANTS, lines, strict=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_no_register_is_spilled(name: str, reports: Reports) -> None:
    report = reports[name]
    assert report["spilled"] <= MAX_SPILLED_BYTES, report
    assert report["shared"] <= MAX_SHARED_BYTES, report


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in VARIANTS
        if name.startswith(("shared", "fill")) or name.endswith("warp groups")
    ],
)
def test_tall_tiles_use_the_instruction_of_warp_groups(name: str, reports: Reports) -> None:
    assert reports[name]["wgmma"]


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.endswith("warp groups")])
def test_warp_groups_have_their_registers(name: str, reports: Reports) -> None:
    """Groups that multiply take the registers that the group of the copying warp returns."""
    from parrot.engine.kernels.linear.warp_group_kernels import COPY_REGISTERS, REGISTERS

    groups, copying = 5, COPY_REGISTERS.value
    launched = groups * reports[name]["registers"]
    assert (groups - 1) * REGISTERS.value + copying <= launched <= 65536 // 128


@pytest.mark.parametrize("name", [name for name in VARIANTS if "one row" in name])
def test_two_programs_of_one_row_fit_a_multiprocessor(name: str, reports: Reports) -> None:
    report = reports[name]
    assert 65536 // (report["registers"] * 32 * VARIANTS[name].get("warps", 8)) >= 2, report


@pytest.mark.parametrize("name", ["narrow deep", "narrow light", "quantised narrow deep"])
def test_several_narrow_programs_fit_a_multiprocessor(name: str, reports: Reports) -> None:
    report = reports[name]
    threads = 32 * VARIANTS[name].get("warps", 4)
    assert 65536 // (report["registers"] * threads) >= 3, report
    assert MAX_SHARED_BYTES // report["shared"] >= 3, report


@pytest.mark.parametrize("name", ["chain", "chain of words"])
def test_a_chain_and_attention_fit_a_multiprocessor(name: str, reports: Reports) -> None:
    """A program of each may start before the other ends."""
    chain, attention = reports[name], reports["one token that copies KV early"]
    warps = 12  # Of a chain: eight that multiply, and a group of four with the one that copies.
    assert 32 * (warps * chain["registers"] + 4 * attention["registers"]) <= 65536
    reserved = 1024  # Of each program.
    assert chain["shared"] + attention["shared"] + reserved <= MAX_SHARED_BYTES
