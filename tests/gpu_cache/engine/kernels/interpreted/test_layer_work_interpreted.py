"""What a layer costs the CPU inside a step, counted: functions of ours, tensors made, kernels bound."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adapterd.gpu_cache.engine.kernels import launch
from fakes.compiled_kernels import FakeKernel
from fakes.one_linear import OneLinear, alone, close

KERNELS = ("shrink.py", "expand.py")


class Operators(TorchDispatchMode):
    """Counts what torch executes, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.found[str(operator)] += 1
        return operator(*args, **(kwargs or {}))


def our_calls(world: OneLinear, x: Tensor) -> list[str]:
    """Names of the project's functions that run while the layer does, without the kernels themselves."""
    found: list[str] = []

    def profile(frame: FrameType, event: str, _arg: object) -> None:
        where = frame.f_code.co_filename
        if event == "call" and "gpu_cache/engine" in where and not where.endswith(KERNELS):
            found.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        world.model["p"](x)
    finally:
        sys.setprofile(None)
    return found


def test_a_layer_of_a_standing_shape_is_nine_calls() -> None:
    world = OneLinear(32, [32], [[4], [9]])
    x, y = world.inputs(3)
    world.model["p"].base = y
    with world.engine.step(world.entries(alone([0, -1, 1]))):  # type: ignore[arg-type]
        world.model["p"](x)
        found = our_calls(world, x)
    assert found == [
        "__call__", "apply", "_plain", "why_not", "run", "run", "_launch", "__call__", "__call__",
    ]  # fmt: skip


def test_a_layer_makes_no_tensor_and_launches_twice() -> None:
    """Neither scratch nor views: they are there since the first layer of the shape."""
    world = OneLinear(32, [32], [[4], [9]])
    x, y = world.inputs(3)
    world.model["p"].base = y
    assert world.engine._fast is not None
    with world.engine.step(world.entries(alone([0, -1, 1]))):  # type: ignore[arg-type]
        world.model["p"](x)
        (bound,) = world.engine._fast.launcher._bound.values()
        kernels = [FakeKernel(call._kernel.arg_names) for call in (bound.shrink, bound.expand)]
        bound.shrink._kernel, bound.expand._kernel = kernels
        with Operators() as operators:
            got = world.model["p"](x)
    assert operators.found == {"aten.clone.default": 1}, "the base's own"
    assert [[address for _, _, address in kernel.launches] for kernel in kernels] == [[x.data_ptr()], [got.data_ptr()]]


def test_what_is_bound_is_forgotten_before_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_BOUND", 3)
    world = OneLinear(16, [16], [[2]])
    assert world.engine._fast is not None
    for rows in range(1, 9):
        owners = alone([0] * rows)
        x, y = world.inputs(rows)
        close(world.run(x, y, owners)[0], world.wanted(x, y, owners))
        assert len(world.engine._fast.launcher._bound) <= 3


def test_layers_of_another_dtype_are_bound_apart() -> None:
    world = OneLinear(32, [32], [[4], [9]])
    owners = alone([0, -1, 1])
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        x, y = (tensor.to(dtype) for tensor in world.inputs(3))
        close(world.run(x, y, owners)[0], world.wanted(x, y, owners))


@pytest.mark.parametrize("case", ["x", "y", "batch"])
def test_tensors_that_are_no_rows_in_order_are_right_too(case: str) -> None:
    """Transposed inputs, outputs with gaps, and leading dimensions that differ."""
    world = OneLinear(32, [32], [[4], [9]])
    owners = alone([0, -1, 1, 0])
    x, y = world.inputs(4)
    wanted = world.wanted(x, y, owners)
    given = x.T.contiguous().T if case == "x" else x.view(2, 2, 32) if case == "batch" else x
    base = torch.zeros(4, 64)[:, ::2] if case == "y" else y
    base.copy_(y)
    got, receipt = world.run(given, base.view(2, 2, 32) if case == "batch" else base, owners)
    assert receipt.kernel == "triton:rows"
    close(got.reshape(4, 32), wanted)
