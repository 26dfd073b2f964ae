"""Launches past Triton's Python give the bits of ordinary ones, and are made only where they may be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fakes.compiled_kernels import at_offset
from fakes.one_linear import OneLinear, alone, close

pytest.importorskip("triton")
import triton

from adapterd.gpu_cache.engine.kernels import direct
from adapterd.gpu_cache.engine.kernels.launch import Launcher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RANKS = [16, 5, 64]


def linear(**options: object) -> OneLinear:
    return OneLinear(
        256, [384, 128], [[rank, rank] for rank in RANKS], torch.bfloat16, "BF16", "cuda:0", page_bytes=1 << 18,
        engine_options=options,
    )  # fmt: skip


def launcher_of(world: OneLinear) -> Launcher:
    assert world.engine._fast is not None
    return world.engine._fast.launcher


@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
def test_a_direct_launch_changes_no_bit(rows: int, pdl: bool) -> None:
    world = linear(pdl=pdl)
    launcher, owners = launcher_of(world), alone([index % 4 - 1 for index in range(rows)])
    x, y = world.inputs(rows)
    assert launcher.direct == direct.OFFERED
    got = [world.run(x, y, owners)[0] for _ in range(3)]
    launcher.direct = False
    got.append(world.run(x, y, owners)[0])
    close(got[0], world.wanted(x, y, owners))
    assert all(torch.equal(one, got[0]) for one in got)


@pytest.mark.skipif(not direct.OFFERED, reason="not offered by this version of Triton")
def test_a_layer_at_an_odd_address_is_right_between_others() -> None:
    """Kernels that were compiled for addresses of a multiple of 16 read 16 bytes at a time."""
    world = linear()
    launcher, owners = launcher_of(world), alone([0, 1, 2, -1])
    x, y = world.inputs(4)
    wanted, _ = world.run(x, y, owners)
    (bound,) = launcher._bound.values()
    assert bound.shrink._ready and bound.expand._ready
    for offset in (2, 0, 8, 0):
        raw = torch.zeros(x.numel() + 8, dtype=x.dtype, device=x.device)
        odd = raw[offset // 2 : offset // 2 + x.numel()].view(x.shape)
        odd.copy_(x)
        assert odd.data_ptr() % 16 == offset
        assert torch.equal(world.run(odd, y, owners)[0], wanted)


@pytest.mark.skipif(not direct.OFFERED, reason="not offered by this version of Triton")
def test_hooks_see_every_launch() -> None:
    world = linear()
    owners, seen = alone([0, 1]), []
    x, y = world.inputs(2)
    wanted = [world.run(x, y, owners)[0] for _ in range(2)][-1]
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(seen.append)
    try:
        assert torch.equal(world.run(x, y, owners)[0], wanted)
    finally:
        hooks.remove(seen.append)
    assert len(seen) == 2
    world.run(x, y, owners)
    assert len(seen) == 2


def test_a_captured_direct_launch_is_right_at_each_replay() -> None:
    world = linear()
    owners = alone([2, 0, -1, 1])
    x, y = world.inputs(4)
    wanted, _ = world.run(x, y, owners)
    world.model["p"].base = y
    with world.engine.step(world.entries(owners)):  # type: ignore[arg-type]
        world.model["p"](x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out: Tensor = world.model["p"](x)
        for _ in range(3):
            out.zero_()
            graph.replay()
            assert torch.equal(out, wanted)


def test_tritons_own_kernels_are_what_the_fake_is() -> None:
    """Compiled anew for another alignment, and called with every argument in the order of `arg_names`."""
    world = linear()
    x, y = world.inputs(3)
    world.run(x, y, alone([0, 1, 2]))
    (bound,) = launcher_of(world)._bound.values()
    call = bound.shrink
    compiled = [
        call._kernel[call._grid](tensor, *call._others, **call._constants)
        for tensor in (x, x.clone(), torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)[1:])
    ]
    assert compiled[0] is compiled[1] is not compiled[2]
    names = list(call._kernel.arg_names)
    assert names[0] == "x" and len(call._bound(compiled[0])[-1]) == len(names) - 1
    assert at_offset(4, 8).data_ptr() % 16 == 8
