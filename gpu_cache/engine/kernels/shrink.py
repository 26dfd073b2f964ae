"""h = scaling · weight · (x Aᵀ), as partial sums over pieces of K: the first of the two kernels of a linear.

    planes[part, row, lane] = factor · Σ_{k in part} x[row, k] · A[lane, k]

One launch does all slices of a fused linear. Work comes from lists of int32 entries of 8 (`device_plan`), places
of rank blocks from one cell a block (`device_tables`): (offset in 16-byte units << 8) | rows. An empty entry ends
its program at once, so a grid may be longer than a step's work. Offsets count 16-byte units so that the compiler
sees their alignment and reads 16 bytes at a time.

Sums over K are split in `SPLIT` parts of fixed bounds, each in a plane of its own: no atomics, so the same bits
from run to run. What stands in lanes without a rank row is nobody's: `expand` lets none of it through.

With programmatic dependent launch a program starts while the kernel before it in the stream ends, whatever that is,
and waits before it reads anything: what is saved is the launch. `expand` may start when all have waited. (Reading lists
or A ahead of the wait, or letting `expand` start ahead of it, was slower on one H200 where rows are worked on one by
one.)
"""

# Triton's own types are not Python's:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def entry_of(parts, first, start, block, live):
    """Where the cell of `block` is: a single adapter's lie in a row, a composition's are listed."""
    listed = tl.load(parts + start + block, mask=live & (start >= 0), other=0)
    return tl.where(start < 0, first + block, listed)


@triton.jit
def weight_of(weights, start, block, live):
    """The weight of `block` in its composition; a single adapter's is 1."""
    listed = tl.load(weights + start + block, mask=live & (start >= 0), other=0.0)
    return tl.where(start < 0, 1.0, listed)


@triton.jit(do_not_specialize=["rows"])
def shrink_rows(
    x, arena, cells, scales, planes, items, parts, weights, rows,
    K: tl.constexpr, K_PART: tl.constexpr, ENTRIES: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, SPLIT: tl.constexpr, BLOCK_K: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row, one rank block of one slice, one part of K a program, without tensor cores.

    Grid: (items, SPLIT · slices). `ROWS` lanes a block, `BLOCKS` blocks a slice in a plane, `WIDTH` lanes a row.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    item = items + tl.program_id(0) * 8
    row = tl.load(item)
    count = tl.load(item + 1)
    first = tl.load(item + 2)
    block = tl.load(item + 3) & 65535
    start = tl.load(item + 4)
    part = tl.program_id(1) % SPLIT
    piece = tl.program_id(1) // SPLIT
    if count > 0:
        entry = piece * ENTRIES + entry_of(parts, first, start, block, True)
        cell = tl.load(cells + entry)
        used = (cell & 255).to(tl.int32)
        if used > 0:
            factor = tl.load(scales + 2 * entry.to(tl.int64)) * weight_of(weights, start, block, True)
            lane = tl.arange(0, ROWS)
            live = lane < used
            k = part * K_PART + tl.arange(0, BLOCK_K)
            at_x = x + row.to(tl.int64) * K
            at_a = arena + (cell >> 8) * UNIT + lane[:, None] * K
            acc = tl.zeros((ROWS, BLOCK_K), tl.float32)
            for k0 in range(0, K_PART, BLOCK_K):
                kk = k + k0
                if EVEN:
                    a = tl.load(at_a + kk[None, :], mask=live[:, None], other=0.0)
                    xv = tl.load(at_x + kk)
                else:
                    inside = kk < K
                    a = tl.load(at_a + kk[None, :], mask=live[:, None] & inside[None, :], other=0.0)
                    xv = tl.load(at_x + kk, mask=inside, other=0.0)
                acc += a.to(tl.float32) * xv.to(tl.float32)[None, :]
            to = planes + (part.to(tl.int64) * rows + row) * WIDTH + (piece * BLOCKS + block) * ROWS + lane
            tl.store(to, tl.sum(acc, 1) * factor, mask=live)


@triton.jit(do_not_specialize=["rows"])
def shrink_tiles(
    x, arena, cells, scales, planes, order, tiles, parts, weights, rows,
    K: tl.constexpr, K_PART: tl.constexpr, ENTRIES: tl.constexpr, SLICES: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, UNIT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Up to `BLOCK_M` rows of one composition and `LANES` lanes over all slices a program, with tensor cores.

    Grid: (tiles, SPLIT, chunks of lanes). x is read once for the lanes of a program, whatever slice they are of.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tiles + tl.program_id(0) * 8
    begin = tl.load(tile)
    count = tl.load(tile + 1)
    first = tl.load(tile + 2)
    blocks = tl.load(tile + 3)
    start = tl.load(tile + 4)
    part = tl.program_id(1)
    column0 = tl.program_id(2) * (LANES // ROWS)
    if (count > 0) & (column0 < SLICES * blocks):
        lane = tl.arange(0, LANES)
        column = column0 + lane // ROWS
        piece = column // blocks
        block = column - piece * blocks
        live = piece < SLICES
        entry = piece * ENTRIES + entry_of(parts, first, start, block, live)
        cell = tl.load(cells + entry, mask=live, other=0)
        inner = lane % ROWS
        used = inner < (cell & 255).to(tl.int32)
        if tl.sum(used.to(tl.int32), 0) > 0:
            factor = tl.load(scales + 2 * entry.to(tl.int64), mask=live, other=0.0)
            factor *= weight_of(weights, start, block, live)
            m = tl.arange(0, BLOCK_M)
            own = m < count
            row = tl.load(order + begin + m, mask=own, other=0).to(tl.int64)
            at_x = x + row[:, None] * K
            at_a = arena + ((cell >> 8) * UNIT + inner * K)[:, None]
            acc = tl.zeros((BLOCK_M, LANES), tl.float32)
            for k0 in tl.range(0, K_PART, BLOCK_K, num_stages=STAGES):
                k = part * K_PART + k0 + tl.arange(0, BLOCK_K)
                if EVEN:
                    a = tl.load(at_a + k[None, :], mask=used[:, None], other=0.0)
                    xv = tl.load(at_x + k[None, :], mask=own[:, None], other=0.0)
                else:
                    inside = (k < K)[None, :]
                    a = tl.load(at_a + k[None, :], mask=used[:, None] & inside, other=0.0)
                    xv = tl.load(at_x + k[None, :], mask=own[:, None] & inside, other=0.0)
                acc = tl.dot(xv.to(OPERAND), a.to(OPERAND).T, acc, input_precision=PRECISION)
            to = (planes + (part.to(tl.int64) * rows + row) * WIDTH)[:, None]
            to += ((piece * BLOCKS + block) * ROWS + inner)[None, :]
            tl.store(to, acc * factor[None, :], mask=own[:, None] & live[None, :])  # whole blocks: wider stores
