"""y += h B, the second of the two kernels of a linear: sums the planes of `shrink` in order, once, and adds.

    y[row, column] = round(y[row, column] + Σ_lane (Σ_part planes[part, row, lane]) · B[lane, column])

One addition in fp32 and one rounding to the layer's dtype. B is stored transposed, [rank, out], so that any rank
reads whole lines. Output columns are cut into strips that lie in one slice each (`columns`). Rows that no entry
names, those of the base, are not touched (I18).

With programmatic dependent launch a program starts while `shrink` still runs, fetches what does not depend on it
(B and y) and then waits for the planes.
"""

# Triton's own types are not Python's:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from adapterd.gpu_cache.engine.kernels.shrink import entry_of


@triton.jit
def _b_rows(
    cells, parts, first, start, block0, blocks, piece, width,
    ENTRIES: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Where the rows of B of `LANES` lanes from block `block0` begin in the arena, in elements, and which exist."""
    lane = tl.arange(0, LANES)
    if LANES == ROWS:
        cell = tl.load(cells + piece * ENTRIES + entry_of(parts, first, start, block0, True))
        return (cell >> 8) * UNIT + lane * width, lane < (cell & 255).to(tl.int32)
    block = block0 + lane // ROWS
    live = block < blocks
    entry = piece * ENTRIES + entry_of(parts, first, start, block, live)
    cell = tl.load(cells + entry, mask=live, other=0)
    inner = lane % ROWS
    return (cell >> 8) * UNIT + inner * width, inner < (cell & 255).to(tl.int32)


@triton.jit
def _h_of_row(at_h, plane, used, SPLIT: tl.constexpr):
    """[lanes] fp32: the planes summed in order.

    A plane holds anything where no rank row is: it is read all the same, since a mask would cut the loads to four
    bytes, and put out in registers.
    """
    h = tl.load(at_h)
    for p in tl.static_range(1, SPLIT):
        h += tl.load(at_h + p * plane)
    return tl.where(used, h, 0.0)


@triton.jit
def _row(
    y, arena, cells, planes, parts, row, first, blocks, start, piece, width, n, out, rows,
    N: tl.constexpr, ENTRIES: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    SPLIT: tl.constexpr, LANES: tl.constexpr, MORE: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row and one strip, `LANES` lanes at a time; `MORE`: a composition may have more of them."""
    lane = tl.arange(0, LANES)
    inside = n < width
    off, used = _b_rows(cells, parts, first, start, 0, blocks, piece, width, ENTRIES, ROWS, LANES, UNIT)
    at_y = y + row.to(tl.int64) * N + out
    if EVEN:
        b = tl.load(arena + off[:, None] + n[None, :], mask=used[:, None], other=0.0)
        yv = tl.load(at_y).to(tl.float32)
    else:
        b = tl.load(arena + off[:, None] + n[None, :], mask=used[:, None] & inside[None, :], other=0.0)
        yv = tl.load(at_y, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at_h = planes + row.to(tl.int64) * WIDTH + piece * BLOCKS * ROWS + lane
    plane = rows.to(tl.int64) * WIDTH
    h = _h_of_row(at_h, plane, used, SPLIT)
    d = tl.sum(b.to(tl.float32) * h[:, None], 0)
    if MORE:
        for block in range(LANES // ROWS, blocks, LANES // ROWS):
            off, used = _b_rows(cells, parts, first, start, block, blocks, piece, width, ENTRIES, ROWS, LANES, UNIT)
            b = tl.load(arena + off[:, None] + n[None, :], mask=used[:, None] & inside[None, :], other=0.0)
            h = _h_of_row(at_h + block * ROWS, plane, used, SPLIT)
            d += tl.sum(b.to(tl.float32) * h[:, None], 0)
    total = (yv + d).to(y.dtype.element_ty)
    if EVEN:
        tl.store(at_y, total)
    else:
        tl.store(at_y, total, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def expand_rows(
    y, arena, cells, planes, tiles, strips, parts, rows,
    N: tl.constexpr, ENTRIES: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row and one strip of `BLOCK_N` columns a program, without tensor cores.

    Grid: (strips, rows). The lanes are as many as the entry's blocks need, of 16, 32 and 64.
    """
    tile = tiles + tl.program_id(1) * 8
    row = tl.load(tile)
    count = tl.load(tile + 1)
    first = tl.load(tile + 2)
    blocks = tl.load(tile + 3)
    start = tl.load(tile + 4)
    strip = strips + tl.program_id(0) * 4
    piece = tl.load(strip)
    n = tl.load(strip + 1) * STEP + tl.arange(0, BLOCK_N)
    out = tl.load(strip + 2) * STEP + tl.arange(0, BLOCK_N)
    width = tl.load(strip + 3) * STEP
    MOST: tl.constexpr = BLOCKS * ROWS
    if count > 0:
        if MOST <= 16:
            _row(y, arena, cells, planes, parts, row, first, blocks, start, piece, width, n, out, rows,
                 N, ENTRIES, BLOCKS, ROWS, WIDTH, SPLIT, MOST, False, UNIT, EVEN, PDL)  # fmt: skip
        elif blocks * ROWS <= 16:
            _row(y, arena, cells, planes, parts, row, first, blocks, start, piece, width, n, out, rows,
                 N, ENTRIES, BLOCKS, ROWS, WIDTH, SPLIT, 16, False, UNIT, EVEN, PDL)  # fmt: skip
        elif MOST <= 32 or blocks * ROWS <= 32:
            _row(y, arena, cells, planes, parts, row, first, blocks, start, piece, width, n, out, rows,
                 N, ENTRIES, BLOCKS, ROWS, WIDTH, SPLIT, 32, False, UNIT, EVEN, PDL)  # fmt: skip
        else:
            _row(y, arena, cells, planes, parts, row, first, blocks, start, piece, width, n, out, rows,
                 N, ENTRIES, BLOCKS, ROWS, WIDTH, SPLIT, 64, MOST > 64, UNIT, EVEN, PDL)  # fmt: skip


@triton.jit
def _h(at_h, plane, own, used, SPLIT: tl.constexpr, WHOLE: tl.constexpr):
    """[rows, lanes] fp32: as `_h_of_row`. `WHOLE`: every lane has a place in a plane."""
    mask = own[:, None] if WHOLE else own[:, None] & used[None, :]
    h = tl.load(at_h, mask=mask, other=0.0)
    for p in tl.static_range(1, SPLIT):
        h += tl.load(at_h + p * plane, mask=mask, other=0.0)
    return tl.where(used[None, :], h, 0.0)


@triton.jit
def _tile(
    y, arena, cells, planes, order, parts, begin, count, first, blocks, start, piece, width, n0, out0, rows,
    N: tl.constexpr, ENTRIES: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    SPLIT: tl.constexpr, LANES: tl.constexpr, MORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WALK: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`BLOCK_M` rows walk `WALK` column tiles: h is summed once and stays in registers."""
    lane = tl.arange(0, LANES)
    m = tl.arange(0, BLOCK_M)
    own = m < count
    row = tl.load(order + begin + m, mask=own, other=0).to(tl.int64)
    off, used = _b_rows(cells, parts, first, start, 0, blocks, piece, width, ENTRIES, ROWS, LANES, UNIT)
    at_b = arena + off[:, None]
    at_y = y + row[:, None] * N
    at_h = planes + row[:, None] * WIDTH + (piece * BLOCKS * ROWS + lane)[None, :]
    plane = rows.to(tl.int64) * WIDTH
    if PDL:
        tl.extra.cuda.gdc_wait()
    h = _h(at_h, plane, own, used, SPLIT, LANES <= BLOCKS * ROWS).to(OPERAND)
    for i in tl.range(0, WALK, num_stages=STAGES):
        n = n0 + i * BLOCK_N + tl.arange(0, BLOCK_N)
        out = out0 + i * BLOCK_N + tl.arange(0, BLOCK_N)
        if EVEN:
            b = tl.load(at_b + n[None, :], mask=used[:, None], other=0.0)
            yv = tl.load(at_y + out[None, :], mask=own[:, None], other=0.0)
        else:
            b = tl.load(at_b + n[None, :], mask=used[:, None] & (n < width)[None, :], other=0.0)
            yv = tl.load(at_y + out[None, :], mask=own[:, None] & (n < width)[None, :], other=0.0)
        d = tl.dot(h, b.to(OPERAND), input_precision=PRECISION)
        if MORE:
            for block in tl.range(LANES // ROWS, blocks, LANES // ROWS, num_stages=1):
                off_, used_ = _b_rows(
                    cells, parts, first, start, block, blocks, piece, width, ENTRIES, ROWS, LANES, UNIT
                )
                h_ = _h(at_h + block * ROWS, plane, own, used_, SPLIT, True)
                b = tl.load(arena + off_[:, None] + n[None, :], mask=used_[:, None] & (n < width)[None, :], other=0.0)
                d = tl.dot(h_.to(OPERAND), b.to(OPERAND), d, input_precision=PRECISION)
        total = (yv.to(tl.float32) + d).to(y.dtype.element_ty)
        if EVEN:
            tl.store(at_y + out[None, :], total, mask=own[:, None])
        else:
            tl.store(at_y + out[None, :], total, mask=own[:, None] & (n < width)[None, :])


@triton.jit(do_not_specialize=["rows"])
def expand_tiles(
    y, arena, cells, planes, order, tiles, strips, parts, rows,
    N: tl.constexpr, ENTRIES: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    SPLIT: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WALK: tl.constexpr, STAGES: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to `BLOCK_M` rows of one composition and one strip of `WALK · BLOCK_N` columns a program.

    Grid: (strips, tiles). Tiles whose blocks fit into `FEW` lanes use that many, the others `MANY` at a time.
    """
    tile = tiles + tl.program_id(1) * 8
    begin = tl.load(tile)
    count = tl.load(tile + 1)
    first = tl.load(tile + 2)
    blocks = tl.load(tile + 3)
    start = tl.load(tile + 4)
    strip = strips + tl.program_id(0) * 4
    piece = tl.load(strip)
    n0 = tl.load(strip + 1) * STEP
    out0 = tl.load(strip + 2) * STEP
    width = tl.load(strip + 3) * STEP
    MORE: tl.constexpr = BLOCKS * ROWS > MANY
    if count > 0:
        if FEW == MANY:
            _tile(y, arena, cells, planes, order, parts, begin, count, first, blocks, start, piece, width, n0, out0,
                  rows, N, ENTRIES, BLOCKS, ROWS, WIDTH, SPLIT, MANY, MORE, BLOCK_M, BLOCK_N, WALK, STAGES, UNIT,
                  OPERAND, PRECISION, EVEN, PDL)  # fmt: skip
        elif blocks * ROWS <= FEW:
            _tile(y, arena, cells, planes, order, parts, begin, count, first, blocks, start, piece, width, n0, out0,
                  rows, N, ENTRIES, BLOCKS, ROWS, WIDTH, SPLIT, FEW, False, BLOCK_M, BLOCK_N, WALK, STAGES, UNIT,
                  OPERAND, PRECISION, EVEN, PDL)  # fmt: skip
        else:
            _tile(y, arena, cells, planes, order, parts, begin, count, first, blocks, start, piece, width, n0, out0,
                  rows, N, ENTRIES, BLOCKS, ROWS, WIDTH, SPLIT, MANY, MORE, BLOCK_M, BLOCK_N, WALK, STAGES, UNIT,
                  OPERAND, PRECISION, EVEN, PDL)  # fmt: skip
