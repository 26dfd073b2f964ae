"""Compiled kernels are launched past Triton's Python only for arguments like those that they were compiled for."""

from __future__ import annotations

import inspect

import pytest
import torch

pytest.importorskip("triton")
import triton

from adapterd.gpu_cache.engine.device_plan import LaunchShape, PlanView, Regime
from adapterd.gpu_cache.engine.kernels import direct
from adapterd.gpu_cache.engine.kernels.direct import Direct, watched
from adapterd.gpu_cache.engine.kernels.forms import Form, Linear
from adapterd.gpu_cache.engine.kernels.launch import Launcher
from fakes.compiled_kernels import FakeKernel, at_offset

NAMES = ("y", "planes", "tiles", "rows", "N", "PDL")
CONSTANTS = {"N": 64, "PDL": True, "num_warps": 4, "launch_pdl": True}
STREAM = 7


def test_the_second_launch_is_direct() -> None:
    kernel, first, second = FakeKernel(NAMES), at_offset(16, 0), at_offset(16, 0)
    call = Direct().call(kernel, (3, 2), (at_offset(16, 0), at_offset(16, 4), 64), CONSTANTS)
    for tensor in (first, second, first):
        call(tensor, STREAM)
    assert kernel.ordinary == 1
    assert kernel.launches == [
        ((3, 2), None, first.data_ptr()), ((3, 2, 1), STREAM, second.data_ptr()), ((3, 2, 1), STREAM, first.data_ptr()),
    ]  # fmt: skip


def test_an_address_of_another_alignment_goes_the_ordinary_way() -> None:
    """Before and after there is a compiled kernel; what it has compiled is never used for aligned ones."""
    kernel, straight, askew = FakeKernel(NAMES), at_offset(16, 0), at_offset(16, 4)
    call = Direct().call(kernel, (1,), (at_offset(16, 0), at_offset(16, 0), 64), CONSTANTS)
    for tensor in (askew, askew, straight, askew, straight, straight, askew):
        call(tensor, STREAM)
    assert [stream for _, stream, _ in kernel.launches] == [None, None, None, None, STREAM, STREAM, None]
    assert len(kernel.compiled) == 2


def test_linears_share_what_is_compiled_for_both() -> None:
    known, kernel, tensor = Direct(), FakeKernel(NAMES), at_offset(16, 0)

    def launch(planes: int, rows: int, width: int, dtype: torch.dtype = torch.float32) -> int:
        others = at_offset(16, planes), at_offset(16, 0).to(dtype), rows
        known.call(kernel, (rows,), others, {**CONSTANTS, "N": width})(tensor, STREAM)
        return kernel.ordinary

    assert [launch(0, 64, 64), launch(0, 64, 64), launch(0, 48, 64)] == [1, 1, 1]
    assert launch(8, 64, 64) == 2, "another alignment"
    assert launch(0, 60, 64) == 3, "a number that 16 does not divide"
    assert launch(0, 1, 64) == 4, "the number 1"
    assert launch(0, 64, 32) == 5, "another constant"
    assert launch(0, 64, 64, torch.int32) == 6, "another dtype of an argument"
    assert launch(0, 1 << 31, 64) == 7, "a number of 64 bits"
    assert launch(8, 64, 64) == 7


def test_dtypes_of_the_layer_are_kept_apart() -> None:
    known, kernel = Direct(), FakeKernel(NAMES)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        known.call(kernel, (1,), (at_offset(16, 0), at_offset(16, 0), 64), CONSTANTS)(
            torch.zeros(64, dtype=dtype), STREAM
        )
    assert kernel.ordinary == 2


def test_without_a_stream_every_launch_is_ordinary() -> None:
    kernel, tensor = FakeKernel(NAMES), at_offset(16, 0)
    call = Direct().call(kernel, (1,), (tensor, tensor, 64), CONSTANTS)
    for stream in (None, STREAM, None, STREAM):
        call(tensor, stream)
    assert [stream for _, stream, _ in kernel.launches] == [None, None, None, STREAM]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_that_wants_to_see_launches_is_noticed(name: str) -> None:
    def hook(_metadata: object) -> None:
        raise AssertionError("nothing is launched here")

    chain = getattr(triton.knobs.runtime, name)
    assert not watched()
    chain.add(hook)
    try:
        assert watched()
    finally:
        chain.remove(hook)
    assert not watched()


def test_tritons_own_launch_is_the_one_that_was_read() -> None:
    """Of the version that is installed: what `Call` passes is what Triton passes, in that order."""
    source = " ".join(inspect.getsource(triton.runtime.jit.JITFunction.run).split())
    if _installed() in direct.LAUNCHERS_READ:
        assert (
            "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata, "
            "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())"
        ) in source


def _installed() -> str:
    return ".".join(triton.__version__.split(".")[:2])


@pytest.mark.parametrize("regime", list(Regime))
def test_arguments_stand_where_the_kernels_have_them(regime: Regime) -> None:
    """By name: a list in the place of another would be read as it."""
    form = Form(32, 16, ((0, 16),), 16)
    launcher = Launcher([form], torch.zeros(1 << 10, dtype=torch.uint8), torch.float32, 2, shared_memory=99 << 10)
    cells, lists = torch.zeros(64, dtype=torch.int64), [torch.zeros(64, dtype=torch.int32) for _ in range(4)]
    weights = torch.zeros(64)
    linear = Linear(form, cells, cells[8:], cells[16:].view(torch.float32))
    plan = PlanView(LaunchShape(regime, 4, 1 if regime is Regime.ROWS else 16, 4, 4, 1), *lists, weights)
    bound = launcher._bind(linear, plan, torch.float32, torch.float32)
    known = {
        "arena": launcher._arena, "scales": linear.scales, "planes": launcher._planes[-1], "rows": 4,
        "tiles": plan.tiles, "items": plan.items, "order": plan.order, "parts": plan.parts, "weights": weights,
    }  # fmt: skip
    for call, first, side in ((bound.shrink, "x", linear.a), (bound.expand, "y", linear.b)):
        names = call._kernel.arg_names
        assert names[0] == first
        named = dict(zip(names[1:], call._others, strict=False))
        assert named.pop("cells") is side
        strips = named.pop("strips", None)
        assert (strips is None) == (first == "x")
        assert all(value is known[name] or value == 4 for name, value in named.items())
        missing = set(names[1:]) - set(named) - {"cells", "strips"} - set(call._constants)
        assert not missing, "neither an argument nor a constant"
