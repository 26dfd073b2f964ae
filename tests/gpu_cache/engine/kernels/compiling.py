"""Compiles the kernels for a card that is not here, as an engine would launch them: see `test_compiles.py`.

python compiling.py 90     one JSON line a kernel: registers, spilled bytes, shared memory, wide loads before its wait
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from adapterd.gpu_cache.engine.device_plan import LaunchShape, Regime
from adapterd.gpu_cache.engine.kernels.expand import expand_rows, expand_tiles
from adapterd.gpu_cache.engine.kernels.forms import Form
from adapterd.gpu_cache.engine.kernels.launch import Launcher
from adapterd.gpu_cache.engine.kernels.shrink import shrink_rows, shrink_tiles

WORD = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
POINTERS = {
    "cells": "*i64", "scales": "*fp32", "planes": "*fp32", "items": "*i32", "tiles": "*i32",
    "parts": "*i32", "weights": "*fp32", "order": "*i32", "strips": "*i32", "rows": "i32",
}  # fmt: skip
FORMS = {
    "q": Form(4096, 4096, ((0, 4096),), 16),
    "qkv": Form(4096, 6144, ((0, 4096), (4096, 1024), (5120, 1024)), 16),
    "gate_up": Form(4096, 28672, ((0, 14336), (14336, 14336)), 16),
    "down": Form(14336, 4096, ((0, 4096),), 16),
    "odd": Form(100, 130, ((0, 100), (100, 30)), 8),
}
SHAPES = {
    "decode": LaunchShape(Regime.ROWS, 64, 1, 64, 64, 1),
    "mixed": LaunchShape(Regime.ROWS, 64, 1, 64, 256, 8),
    "shared": LaunchShape(Regime.TILES, 256, 16, 96, 16, 4),
    "shared r128": LaunchShape(Regime.TILES, 256, 16, 96, 16, 8),
    "prefill": LaunchShape(Regime.TILES, 2048, 64, 48, 16, 1),
    "r64": LaunchShape(Regime.ROWS, 64, 1, 64, 256, 4),
    "prefill r64": LaunchShape(Regime.TILES, 2048, 64, 48, 16, 4),
    "wide": LaunchShape(Regime.TILES, 2048, 64, 48, 16, 8),
}
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}
CASES = [
    ("q", "decode", torch.bfloat16), ("qkv", "mixed", torch.bfloat16), ("down", "decode", torch.float16),
    ("q", "r64", torch.bfloat16), ("q", "prefill", torch.bfloat16), ("qkv", "prefill r64", torch.bfloat16),
    ("qkv", "wide", torch.bfloat16), ("q", "prefill", torch.float16), ("q", "prefill", torch.float32),
    ("gate_up", "shared", torch.bfloat16), ("q", "shared r128", torch.bfloat16), ("q", "wide", torch.float32),
    ("odd", "mixed", torch.float32), ("odd", "wide", torch.bfloat16),
]  # fmt: skip


def compiled(kernel: Any, constants: Mapping[str, Any], types: Mapping[str, str], capability: int) -> dict[str, int]:
    """Registers of a thread, spilled bytes and shared memory of one kernel; an error if it does not compile.

    And what it reads before it waits for the kernel in front of it: how many wide loads; −1 if it does not wait.
    """
    options = {key: constants[key] for key in ("num_warps", "num_stages", "launch_pdl") if key in constants}
    fixed = {name: constants[name] for name in kernel.arg_names if name in constants}
    signature = {name: "constexpr" if name in fixed else types[name] for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    source = ASTSource(kernel, signature, fixed, aligned)
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = done.asm["ptx"]
    return {**_resources(ptx, capability), "shared": done.metadata.shared, "ahead": _wide_loads_ahead(ptx)}


def _wide_loads_ahead(ptx: str) -> int:
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    return len(re.findall(r"ld\.global\S*\.v4\.|cp\.async\.c", before)) if wait else -1


def _resources(ptx: str, capability: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        arch = f"sm_{capability}{'a' if capability == 90 else ''}"
        tool = triton.knobs.nvidia.ptxas.path
        said = subprocess.run(
            [tool, "-v", f"--gpu-name={arch}", "-o", f"{folder}/out", str(path)],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    registers, spills = re.search(r"Used (\d+) registers", said), re.findall(r"(\d+) bytes spill", said)
    assert registers is not None, said
    return {"registers": int(registers[1]), "spills": sum(map(int, spills))}


def reports(capability: int) -> Iterator[dict[str, Any]]:
    pdl = capability >= 90
    for form, shape, dtype in CASES:
        arena = torch.zeros(16, dtype=torch.uint8)
        launcher = Launcher([FORMS[form]], arena, dtype, 8, pdl=pdl, shared_memory=SHARED_MEMORY[capability])
        launch = launcher.launch_of(FORMS[form], SHAPES[shape], dtype, dtype)
        types = {**POINTERS, "x": WORD[dtype], "y": WORD[dtype], "arena": WORD[dtype]}
        pair = (shrink_rows, expand_rows) if SHAPES[shape].regime is Regime.ROWS else (shrink_tiles, expand_tiles)
        for kernel, constants in zip(pair, (launch.shrink, launch.expand), strict=True):
            found = compiled(kernel, constants, types, capability)
            yield {"kernel": kernel.__name__, "form": form, "shape": shape, "dtype": str(dtype), **found}


if __name__ == "__main__":
    for report in reports(int(sys.argv[1])):
        print(json.dumps(report), flush=True)
